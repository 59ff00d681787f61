"""What masks cost beside a decode step.

``python -m tests.bench.bench_grammar CHECKPOINT [--vocabulary DIR]``, where CHECKPOINT is a directory with
its tokenizer. Decodes 8 sequences at a time, once free and once held to a JSON schema, and times what the
grammars do within a step: following the tokens, filling masks, applying them. ``--vocabulary`` also times
masks over another vocabulary, such as Kimi's of 163,840 tokens, which needs no weights.

Times are CPU time of the one thread that does it all, so that a busy machine does not change them much.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.engine.engine import Engine
from backend.engine.grammars import GrammarPool
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner
from backend.engine.sequence import Sequence
from backend.text.answer_rules import AnswerRules, ContentRule
from backend.text.grammar import write_grammar
from backend.text.grammar_tokenizer import build_grammar_tokenizer
from backend.text.model_text import load_model_text
from backend.text.prompt import ModelText

BATCH = 8
NUM_TOKENS = 96
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "number"}, "kind": {"enum": ["new", "old"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 50}
ANSWER = json.dumps([{"name": "A long name, as names go.", "size": 12.5, "kind": "new"}] * 6)


def grammar() -> str:
    rules = AnswerRules(ContentRule(SCHEMA, "schema"))
    return write_grammar(rules, marks=None, reasoning_end=None)


def mask_times_ms(text: ModelText, vocab_size: int) -> list[float]:
    """Following, filling and applying for a batch, for each token of an answer."""
    tokenizer = build_grammar_tokenizer(text, (0,) if not text.stop_token_ids else ())
    pool = GrammarPool(lambda: tokenizer, max_rows=BATCH, max_cached=4)
    rows = [pool.new(grammar()) for _ in range(BATCH)]
    request = SequenceRequest(
        sequence_id=1, prompt_token_ids=[0], sampling=SamplingParams(max_tokens=1, grammar=grammar())
    )
    sequence = Sequence(request)
    logits = torch.randn(BATCH, vocab_size)
    times: list[float] = []
    for token_id in text.encode_text(ANSWER)[:-1]:
        started_at = time.process_time()
        for index, row in enumerate(rows):
            row.follow(sequence)
            row.fill(pool.mask(index))
        pool.forbid(logits, range(BATCH))
        for row in rows:
            row.accept(token_id)
        times.append((time.process_time() - started_at) * 1000)
        sequence.token_ids.append(token_id)
    pool.close()
    return times


def step_times_ms(engine: Engine, prompt: list[int], grammar_of_all: str) -> list[float]:
    """Decode steps with the whole batch running."""
    for sequence_id in range(BATCH):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, grammar=grammar_of_all)
        engine.submit(SequenceRequest(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=sampling))
    times: list[float] = []
    while engine.has_work:
        started_at = time.process_time()
        engine.step()
        if len(engine.take_outputs()) == BATCH:
            times.append((time.process_time() - started_at) * 1000)
    return times[2:]


def say(name: str, times: list[float]) -> float:
    mean, last = statistics.fmean(times), sorted(times)[int(0.99 * len(times))]
    print(f"{name:44} mean {mean:8.3f} ms   p99 {last:8.3f} ms   ({len(times)} steps)")
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--vocabulary", type=Path)
    arguments = parser.parse_args()
    config = BackendConfig(
        replica_id="bench",
        model=ModelSource(path=str(arguments.checkpoint), served_as="bench", max_model_len=512),
        cache=CacheConfig(num_blocks=512),
        scheduler=SchedulerConfig(max_running=BATCH),
        device=DeviceConfig(device="cpu", threads=1),
    )
    torch.set_num_threads(1)
    runner = ModelRunner.load(config)
    vocab_size = runner.info.vocab_size
    text = load_model_text(arguments.checkpoint, cache_chars=0, vocab_size=vocab_size)
    tokenizer = build_grammar_tokenizer(text, runner.info.eos_token_ids)
    pool = GrammarPool(lambda: tokenizer, max_rows=BATCH, max_cached=4)
    engine = Engine(
        runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__, grammars=pool
    )
    prompt = text.encode_text("List fifty things with their names and sizes, as JSON.")
    free = say("decode step of 8, free", step_times_ms(engine, prompt, ""))
    say("decode step of 8, held to a schema", step_times_ms(engine, prompt, grammar()))
    masks = say(f"of it masks, vocabulary {vocab_size}", mask_times_ms(text, vocab_size))
    print(f"masks are {100 * masks / free:.1f} % of a free decode step")
    if arguments.vocabulary is not None:
        other = load_model_text(arguments.vocabulary, cache_chars=0, vocab_size=0)
        say(f"masks, vocabulary {len(other.token_bytes)}", mask_times_ms(other, len(other.token_bytes)))
    pool.close()


if __name__ == "__main__":
    main()
