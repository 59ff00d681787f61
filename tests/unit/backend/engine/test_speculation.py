"""Guessing: what prompt lookup proposes, how it adapts, and that answers stay what they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig, SpeculationConfig
from backend.engine import engine as engine_module
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest, TokenOutput
from backend.engine.sequence import Sequence
from backend.engine.speculation import FIRST_DRAFT_TOKENS, MAX_PAUSE_TOKENS, PromptLookup
from tests.support.engine_driver import engine_on, generate
from tests.support.fake_engine import EOS_TOKEN_ID, VOCAB_SIZE, FakeRunner
from tests.support.oracle_lookup import OracleLookup
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

SPECULATING = SpeculationConfig(enabled=True)


def sequence_of(token_ids: list[int], sequence_id: int = 1) -> Sequence:
    sampling = SamplingParams(max_tokens=100)
    return Sequence(SequenceRequest(sequence_id=sequence_id, prompt_token_ids=token_ids, sampling=sampling))


class TestProposing:
    def test_what_followed_the_same_tokens_the_last_time_is_proposed(self) -> None:
        lookup = PromptLookup(8, 2)
        assert lookup.propose(sequence_of([5, 6, 1, 9, 5, 6, 2, 3, 4, 5, 6]), 3) == [2, 3, 4]

    def test_nothing_is_proposed_for_what_is_new_or_without_room(self) -> None:
        lookup = PromptLookup(8, 3)
        assert lookup.propose(sequence_of([1, 2, 3, 4, 5, 6]), 8) == []
        assert lookup.propose(sequence_of([1, 2, 3], 2), 8) == []
        assert lookup.propose(sequence_of([1, 2, 3, 9, 1, 2, 3], 3), 0) == []

    def test_a_run_that_repeats_itself_goes_on(self) -> None:
        lookup = PromptLookup(8, 3)
        assert lookup.propose(sequence_of([7, 8] * 4), 4) == [7, 8, 7, 8]

    def test_generated_tokens_count_like_those_of_the_prompt(self) -> None:
        lookup, sequence = PromptLookup(8, 2), sequence_of([1, 2, 3])
        assert lookup.propose(sequence, 8) == []
        sequence.token_ids += [4, 5, 6, 1, 2]
        assert lookup.propose(sequence, 2) == [3, 4]

    def test_it_grows_with_success_and_shrinks_to_what_was_right(self) -> None:
        lookup, sequence = PromptLookup(16, 1), sequence_of([*range(30), 0])
        assert len(lookup.propose(sequence, 99)) == FIRST_DRAFT_TOKENS
        lookup.observe(sequence, FIRST_DRAFT_TOKENS, FIRST_DRAFT_TOKENS)
        assert len(lookup.propose(sequence, 99)) == 2 * FIRST_DRAFT_TOKENS
        lookup.observe(sequence, 8, 8)
        lookup.observe(sequence, 16, 16)
        assert len(lookup.propose(sequence, 99)) == 16
        lookup.observe(sequence, 16, 3)
        assert len(lookup.propose(sequence, 99)) == 3

    def test_misses_are_followed_by_longer_and_longer_pauses(self) -> None:
        lookup, sequence = PromptLookup(16, 1), sequence_of([1, 1])
        num_guesses = 0
        for _ in range(1000):
            draft = lookup.propose(sequence, 99)
            num_guesses += bool(draft)
            lookup.observe(sequence, len(draft), 0)
            sequence.token_ids.append(1)
        assert num_guesses <= 8 + 1000 // MAX_PAUSE_TOKENS

    def test_ended_sequences_are_forgotten(self) -> None:
        lookup = PromptLookup(8, 2)
        lookup.propose(sequence_of([1, 2, 1, 2]), 3)
        assert lookup.num_remembered == 1
        lookup.forget(1)
        lookup.forget(1)
        assert lookup.num_remembered == 0

    def test_settings_that_cannot_work_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"speculation\.max_draft_tokens: must be at least 1"):
            PromptLookup(0, 3)
        with pytest.raises(ValueError, match=r"speculation\.match_tokens: must be at least 1"):
            PromptLookup(8, 0)


def engine_of(speculation: SpeculationConfig, *, num_blocks: int = 64, **scheduler: Any) -> Engine:
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path="fake", served_as="fake", max_model_len=256),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(**{"max_tokens_per_step": 64, "max_running": 8, **scheduler}),
        speculation=speculation,
    )
    return Engine(FakeRunner(), config, clock_s=lambda: 0.0, draw_seed=itertools.count(1).__next__)


def answers(engine: Engine, requests: list[SequenceRequest]) -> dict[int, TokenOutput]:
    """All that each sequence got, in one output, and its last words."""
    for request in requests:
        engine.submit(request)
    whole: dict[int, TokenOutput] = {}
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.take_outputs():
            before = whole.get(output.sequence_id)
            fields = {name: getattr(output, name) for name in output.__struct_fields__}
            if before is not None:
                fields["token_ids"] = before.token_ids + output.token_ids
                fields["logprobs"] = before.logprobs and before.logprobs + (output.logprobs or [])
                fields["cached_head"] = before.cached_head
            whole[output.sequence_id] = TokenOutput(**fields)
    return whole


def requests_of(**changes: Any) -> list[SequenceRequest]:
    rng = random.Random(4)
    requests = []
    for index in range(6):
        prompt = [rng.randrange(EOS_TOKEN_ID) for _ in range(10 + 7 * index)]
        sampling = {"max_tokens": 20 + 5 * index, "temperature": 3.0, "seed": index, **changes}
        requests.append(
            SequenceRequest(sequence_id=index, prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
        )
    return requests


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"top_p": 0.9},
    "penalised": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "with log probabilities": {"num_logprobs": 2},
    "with stop tokens": {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9))},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


@pytest.mark.parametrize("num_blocks", [64, 17], ids=["roomy", "tight"])
@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
def test_every_answer_is_the_same_with_guesses_of_all_kinds(
    changes: dict[str, Any], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(engine_of(SpeculationConfig()), requests_of(**changes))
    rng = random.Random(9)
    oracle = OracleLookup(lambda sequence: expected[sequence.sequence_id].token_ids, rng)
    monkeypatch.setattr(engine_module, "PromptLookup", lambda *_: oracle)
    engine = engine_of(SPECULATING, num_blocks=num_blocks)
    assert answers(engine, requests_of(**changes)) == expected
    stats = engine.stats()
    assert stats.completion_tokens == sum(len(output.token_ids) for output in expected.values())
    assert stats.num_free_blocks + stats.num_cached_blocks == num_blocks
    if changes.get("max_tokens") == 1:
        assert stats.num_draft_tokens == 0, "nothing may follow the only token"
    elif changes.get("max_tokens") != 2:
        assert 0 < stats.num_right_draft_tokens < stats.num_draft_tokens


def test_a_second_turn_finds_the_blocks_that_guesses_helped_to_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    first = requests_of()[5]
    expected = answers(engine_of(SpeculationConfig()), [first])[5].token_ids
    oracle = OracleLookup(lambda sequence: expected, random.Random(3), wrong_share=0.4)
    monkeypatch.setattr(engine_module, "PromptLookup", lambda *_: oracle)
    engine = engine_of(SPECULATING)
    answers(engine, [first])
    history = [*first.prompt_token_ids, *expected]
    again = SequenceRequest(
        sequence_id=9, prompt_token_ids=[*history, 1, 2], sampling=SamplingParams(max_tokens=1)
    )
    assert answers(engine, [again])[9].cached_prompt_tokens == (len(history) - 1) // 16 * 16


def test_an_early_end_pays_for_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token among right guesses ends the answer there."""
    request = requests_of(temperature=0.0, max_tokens=30)[0]
    said = answers(engine_of(SpeculationConfig()), [request])[0].token_ids
    stop = said[7]
    oracle = OracleLookup(lambda sequence: said, random.Random(1), wrong_share=0.0)
    monkeypatch.setattr(engine_module, "PromptLookup", lambda *_: oracle)
    engine = engine_of(SPECULATING)
    stopping = requests_of(temperature=0.0, max_tokens=30, stop_token_ids=(stop,))[0]
    output = answers(engine, [stopping])[0]
    assert (output.token_ids, output.finish_reason) == (said[: said.index(stop) + 1], "stop")
    assert engine.stats().completion_tokens == len(output.token_ids)


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_kimi])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_real_models_say_the_same_in_fewer_steps(
    tmp_path: Path,
    write: Callable[[Path], object],
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path)
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in (9, 24, 40)]
    plain = engine_on(tmp_path, max_model_len=192, num_blocks=64)
    expected = generate(plain, prompts, max_tokens=100, temperature=temperature)
    oracle = OracleLookup(lambda sequence: expected[sequence.sequence_id], rng, wrong_share=0.1)
    monkeypatch.setattr(engine_module, "PromptLookup", lambda *_: oracle)
    guessing = engine_on(tmp_path, max_model_len=192, num_blocks=64, speculation=SPECULATING)
    assert generate(guessing, prompts, max_tokens=100, temperature=temperature) == expected
    assert guessing.stats().num_steps < 0.7 * plain.stats().num_steps


def test_prompt_lookup_on_a_real_model_changes_nothing(tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path)
    rng = random.Random(2)
    stem = [rng.randrange(3, 256) for _ in range(12)]
    prompts = [stem * 3, [*stem[:7], *stem]]
    plain = engine_on(tmp_path, max_model_len=192, num_blocks=64)
    expected = generate(plain, prompts, max_tokens=100)
    lookup = SpeculationConfig(enabled=True, match_tokens=1)
    guessing = engine_on(tmp_path, max_model_len=192, num_blocks=64, speculation=lookup)
    assert generate(guessing, prompts, max_tokens=100) == expected
    assert guessing.stats().num_draft_tokens > 0
