"""Sequences that are held to grammars: masks, batches, preemption, failures."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from torch import Tensor

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig, SpeculationConfig
from backend.engine import engine as engine_module
from backend.engine.engine import Engine
from backend.engine.grammars import GrammarError, GrammarPool, apply_masks
from backend.engine.messages import SamplingParams, SequenceRequest, TokenOutput
from backend.engine.sequence import Sequence
from backend.engine.step import ShouldStop, StepPlan
from backend.text.answer_rules import AnswerRules
from backend.text.grammar import write_grammar
from tests.support.fake_engine import FakeInfo, FakeRunner
from tests.support.grammar_walks import content_rules, tiny_grammar_tokenizer, tiny_text
from tests.support.oracle_lookup import OracleLookup

EOS = tiny_text().stop_token_ids
VOCAB_SIZE = len(tiny_text().token_bytes)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["a", "bb", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


def grammar_of(rules: AnswerRules, **options: Any) -> str:
    return write_grammar(rules, marks=tiny_text().call_marks, reasoning_end=None, **options)


GRAMMAR = grammar_of(content_rules(SCHEMA))


class NoisyRunner(FakeRunner):
    """Logits that follow from all tokens before, without a peak: a model that says anything."""

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        assert self.model is not None
        logits = torch.empty(0, VOCAB_SIZE)
        for state in self.model.run(plan):
            noise = torch.Generator().manual_seed(int.from_bytes(state[:7], "little"))
            logits = torch.cat([logits, torch.randn(1, VOCAB_SIZE, generator=noise)])
        return logits


@pytest.fixture
def pool() -> Iterator[GrammarPool]:
    pool = GrammarPool(tiny_grammar_tokenizer, max_rows=8, max_cached=4)
    yield pool
    pool.close()


def engine_of(
    pool: GrammarPool | None, *, num_blocks: int = 256, speculation: SpeculationConfig | None = None
) -> Engine:
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path="fake", served_as="fake", max_model_len=256),
        cache=CacheConfig(num_blocks=num_blocks, block_size=4),
        scheduler=SchedulerConfig(max_tokens_per_step=64, max_running=8, max_waiting=8),
        speculation=speculation or SpeculationConfig(),
    )
    runner = NoisyRunner(info=FakeInfo(vocab_size=VOCAB_SIZE, eos_token_ids=EOS[:1]))
    return Engine(runner, config, clock_s=lambda: 0.0, draw_seed=itertools.count(1).__next__, grammars=pool)


def request_of(sequence_id: int, **sampling: Any) -> SequenceRequest:
    params = {
        "max_tokens": 180, "temperature": 1.0, "seed": sequence_id, "stop_token_ids": EOS, "grammar": GRAMMAR
    }  # fmt: skip
    return SequenceRequest(
        sequence_id=sequence_id,
        prompt_token_ids=[sequence_id, 5, 6],
        sampling=SamplingParams(**params | sampling),
    )


def run(engine: Engine) -> dict[int, TokenOutput]:
    """Everything that each sequence said, as one output."""
    said: dict[int, TokenOutput] = {}
    tokens: dict[int, list[int]] = {}
    for _ in range(3000):
        if engine.has_work:
            engine.step()
        for output in engine.take_outputs():
            said[output.sequence_id] = output
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
    assert not engine.has_work
    engine.check_invariants()
    for sequence_id, output in said.items():
        output.token_ids[:] = tokens[sequence_id]
    return said


def text_of(output: TokenOutput) -> str:
    text_ids = output.token_ids if output.is_last_text else output.token_ids[:-1]
    return b"".join(tiny_text().token_bytes[token_id] for token_id in text_ids).decode()


def test_every_completed_answer_meets_its_schema(pool: GrammarPool) -> None:
    engine = engine_of(pool)
    for sequence_id in range(1, 9):
        engine.submit(request_of(sequence_id, temperature=0.0 if sequence_id == 1 else 1.5))
    said = run(engine)
    assert len(said) == 8
    stopped = [output for output in said.values() if output.finish_reason == "stop"]
    assert len(stopped) >= 6, "a schema this small is met within the tokens"
    for output in stopped:
        assert output.is_last_text, "nothing can follow the last brace"
        jsonschema.validate(json.loads(text_of(output)), SCHEMA)
    assert len({text_of(output) for output in stopped}) > 1


def test_preemption_changes_nothing(pool: GrammarPool) -> None:
    roomy, tight = engine_of(pool), engine_of(pool, num_blocks=64)
    for engine in (roomy, tight):
        for sequence_id in range(1, 7):
            engine.submit(request_of(sequence_id, grammar=grammar_of(content_rules({"type": "string"}))))
    calm, tossed = run(roomy), run(tight)
    assert tight.stats().num_preemptions > 0
    assert {key: output.token_ids for key, output in calm.items()} == {
        key: output.token_ids for key, output in tossed.items()
    }


def test_guesses_within_a_grammar_change_nothing(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request_of(sequence_id) for sequence_id in range(1, 7)]
    plain = engine_of(pool)
    for request in requests:
        plain.submit(request)
    expected = run(plain)
    oracle = OracleLookup(lambda sequence: expected[sequence.sequence_id].token_ids, random.Random(5))
    monkeypatch.setattr(engine_module, "PromptLookup", lambda *_: oracle)
    guessing = engine_of(pool, speculation=SpeculationConfig(enabled=True))
    for request in requests:
        guessing.submit(request)
    assert run(guessing) == expected
    stats = guessing.stats()
    assert 0 < stats.num_right_draft_tokens < stats.num_draft_tokens


def test_a_grammar_is_complete_at_the_very_last_token(pool: GrammarPool) -> None:
    engine = engine_of(pool)
    grammar = grammar_of(content_rules({"enum": [True]}))
    num_tokens = len(tiny_text().encode_text("true"))
    engine.submit(request_of(1, grammar=grammar, max_tokens=num_tokens))
    engine.submit(request_of(2, grammar=grammar, max_tokens=num_tokens - 1))
    said = run(engine)
    assert (said[1].finish_reason, said[1].is_last_text, text_of(said[1])) == ("stop", True, "true")
    assert (said[2].finish_reason, said[2].is_last_text) == ("length", False)


def test_an_end_that_is_a_choice_is_the_end_token(pool: GrammarPool) -> None:
    engine = engine_of(pool)
    engine.submit(request_of(1, grammar=grammar_of(content_rules({"type": "integer"}))))
    output = run(engine)[1]
    assert output.finish_reason == "stop"
    assert not output.is_last_text
    assert output.token_ids[-1] in EOS
    json.loads(text_of(output))


def test_a_grammar_that_fails_ends_only_its_own_sequence(pool: GrammarPool) -> None:
    engine = engine_of(pool)
    engine.submit(request_of(1, grammar="start: nothing"))
    engine.submit(request_of(2))
    engine.submit(request_of(3, grammar=""))
    said = run(engine)
    assert said[1].finish_reason == "error"
    assert said[1].message == "the grammar of this answer cannot be compiled"
    assert said[2].finish_reason == "stop"
    assert said[3].finish_reason in ("length", "stop")


def test_a_vocabulary_that_cannot_be_read_ends_only_sequences_with_a_grammar() -> None:
    def build() -> LLTokenizer:
        raise ValueError("no tokenizer")

    pool = GrammarPool(build, max_rows=8, max_cached=4)
    engine = engine_of(pool)
    engine.submit(request_of(1))
    engine.submit(request_of(2, grammar=""))
    said = run(engine)
    assert (said[1].finish_reason, said[1].message) == (
        "error",
        "the grammar of this answer cannot be used: ValueError",
    )
    assert said[2].finish_reason in ("length", "stop")
    pool.close()


@pytest.mark.parametrize(("has_pool", "sampling"), [(False, {}), (True, {"ignore_eos": True})])
def test_what_cannot_be_held_to_a_grammar_is_refused(
    pool: GrammarPool, has_pool: bool, sampling: dict[str, Any]
) -> None:
    engine = engine_of(pool if has_pool else None)
    engine.submit(request_of(1, **sampling))
    assert run(engine)[1].refusal == "invalid_request"


def test_penalties_and_bias_cannot_undo_a_mask(pool: GrammarPool) -> None:
    engine = engine_of(pool)
    engine.submit(
        request_of(
            1, logit_bias=dict.fromkeys(range(200), 100.0), repetition_penalty=1.3, presence_penalty=1.0
        )
    )
    engine.submit(request_of(2, top_k=5, top_p=0.5, min_p=0.01, num_logprobs=2))
    for output in run(engine).values():
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(text_of(output)), SCHEMA)


def test_a_place_in_a_grammar_follows_the_tokens(pool: GrammarPool) -> None:
    grammar = pool.new(GRAMMAR)
    first = tiny_text().encode_text('{"name":"x')
    engine_request = request_of(1)

    sequence = Sequence(engine_request)
    masks = []
    for token_id in first:
        grammar.follow(sequence)
        grammar.fill(pool.mask(0))
        masks.append(pool.mask(0).copy())
        sequence.token_ids.append(token_id)
    grammar.follow(sequence)
    del sequence.token_ids[-2:]  # a step was computed and given up
    grammar.follow(sequence)
    grammar.fill(pool.mask(0))
    assert (pool.mask(0) == masks[-2]).all()
    with pytest.raises(GrammarError):
        grammar.accept(EOS[0])


def test_what_is_kept_is_bounded(pool: GrammarPool) -> None:
    for number in range(10):
        pool.new(grammar_of(content_rules({"const": number})))
    assert pool.num_cached == 4


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 525])
def test_masks_forbid_what_they_do_not_allow(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    masks = rng.integers(-(2**31), 2**31, size=(2, -(-vocab // 32) + 1), dtype=np.int64).astype(np.int32)
    logits = torch.randn(4, vocab)
    expected = logits.clone()
    for mask, row in zip(masks, (3, 1), strict=True):
        for token_id in range(vocab):
            if not (int(mask[token_id // 32]) >> (token_id % 32)) & 1:
                expected[row, token_id] = -torch.inf
    apply_masks(logits, masks, [3, 1])
    assert torch.equal(logits, expected)
