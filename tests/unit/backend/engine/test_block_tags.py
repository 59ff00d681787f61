"""Planted damage to the engine's books: a request may fail, but never read what is another's."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig
from backend.engine.block_tags import BlockTags
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.sequence import InvariantError, Sequence
from backend.engine.step import ScheduledChunk
from tests.support.fake_engine import EOS_TOKEN_ID, VOCAB_SIZE, FakeRunner
from tests.support.fake_model import alone

BLOCK_SIZE = 4
NUM_RUNS = 30
MAX_TOKENS = 12
MAX_STEPS = 600


def chunk_of(start: int, count: int, table: list[int], tags: list[int]) -> ScheduledChunk:
    return ScheduledChunk(
        sequence_id=1,
        token_ids=list(range(count)),
        start=start,
        block_table=table,
        block_tags=tags,
        needs_logits=True,
    )


def test_what_was_written_under_ones_own_tags_is_ones_own() -> None:
    tags = BlockTags(num_blocks=8, block_size=BLOCK_SIZE)
    assert tags.find_mismatches([chunk_of(0, 6, [3, 5], [1, 2])]) == []
    assert tags.find_mismatches([chunk_of(6, 1, [3, 5], [1, 2])]) == []
    assert tags.find_mismatches([chunk_of(7, 2, [3, 5, 0], [1, 2, 3])]) == []


def test_a_block_that_somebody_else_wrote_is_a_mismatch() -> None:
    tags = BlockTags(num_blocks=8, block_size=BLOCK_SIZE)
    assert tags.find_mismatches([chunk_of(0, 6, [3, 5], [1, 2])]) == []
    thief = chunk_of(0, 2, [5], [7])
    reader = chunk_of(6, 1, [3, 5], [1, 2])
    assert tags.find_mismatches([reader, thief]) == [0]
    assert tags.mismatched_places(reader) == [1]
    assert tags.find_mismatches([chunk_of(2, 1, [5], [7])]) == []


def test_a_block_that_nobody_wrote_is_a_mismatch() -> None:
    tags = BlockTags(num_blocks=8, block_size=BLOCK_SIZE)
    assert tags.find_mismatches([chunk_of(4, 1, [3, 5], [1, 2])]) == [0]


def engine_of(num_blocks: int = 40) -> Engine:
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path="fake", served_as="fake", max_model_len=64),
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_tokens_per_step=24, max_running=6, max_waiting=64),
    )
    return Engine(FakeRunner(), config, clock_s=time.monotonic, draw_seed=itertools.count().__next__)


def running(engine: Engine, rng: random.Random) -> Sequence | None:
    sequences: list[Sequence] = [s for s in engine._scheduler._running if s.block_table]
    return rng.choice(sequences) if sequences else None


def free_while_held(engine: Engine, rng: random.Random) -> bool:
    """A block of a running sequence is handed out next."""
    victim = running(engine, rng)
    if victim is None:
        return False
    block = rng.choice(victim.block_table)
    if block in engine._pool._free:
        return False
    engine._pool._free.append(block)
    return True


def slip_in_a_table(engine: Engine, rng: random.Random) -> bool:
    """A block table names a block of somebody else."""
    victim, other = running(engine, rng), running(engine, rng)
    if victim is None or other is None or victim is other:
        return False
    victim.block_table[rng.randrange(len(victim.block_table))] = rng.choice(other.block_table)
    return True


def mislead_the_index(engine: Engine, rng: random.Random) -> bool:
    """A digest leads to the block of another."""
    cache = engine._cache
    assert cache is not None
    if len(cache._block_by_digest) < 2:
        return False
    digest, other = rng.sample(sorted(cache._block_by_digest), 2)
    cache._block_by_digest[digest] = cache._block_by_digest[other]
    return True


def evict_while_held(engine: Engine, rng: random.Random) -> bool:
    """A block that is being read counts as unused."""
    cache, victim = engine._cache, running(engine, rng)
    assert cache is not None
    if victim is None:
        return False
    held = [block for block in victim.block_table if cache.is_registered(block)]
    if not held:
        return False
    cache._unused[rng.choice(held)] = None
    engine._pool._free.clear()
    return True


FAULTS = [free_while_held, slip_in_a_table, mislead_the_index, evict_while_held]


def live(seed: int, fault: Callable[[Engine, random.Random], bool], engine: Engine) -> Counter[str]:
    """A random life with one fault in it: how its requests ended, each answer checked."""
    rng = random.Random(seed)
    stems = [[rng.randrange(EOS_TOKEN_ID) for _ in range(48)] for _ in range(2)]
    prompts: dict[int, list[int]] = {}
    answers: dict[int, list[int]] = {}
    endings: Counter[str] = Counter()
    fault_at, is_planted = rng.randrange(4, 30), False
    ids = itertools.count()
    for at in range(MAX_STEPS):
        if at < 40 and rng.random() < 0.6:
            stem = rng.choice(stems)[: rng.randrange(1, 40)]
            prompt = [*stem, *(rng.randrange(EOS_TOKEN_ID) for _ in range(rng.randrange(1, 8)))]
            prompts[(number := next(ids))] = prompt
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            engine.submit(SequenceRequest(sequence_id=number, prompt_token_ids=prompt, sampling=sampling))
        if at >= fault_at and not is_planted:
            is_planted = fault(engine, rng)
        try:
            engine.step()
        except (InvariantError, KeyError):
            endings["engine stopped"] += 1
            break
        for output in engine.take_outputs():
            answers.setdefault(output.sequence_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                endings[output.finish_reason] += 1
                if output.finish_reason == "length":
                    assert answers[output.sequence_id] == alone(
                        prompts[output.sequence_id], MAX_TOKENS, VOCAB_SIZE
                    )
        if at >= 40 and not engine.has_work:
            break
    endings["mismatches"] = engine.stats().num_kv_mismatches
    return endings


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_no_fault_in_the_books_reaches_an_answer(fault: Callable[[Engine, random.Random], bool]) -> None:
    total: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        total += live(seed, fault, engine_of())
    assert total["mismatches"] > 0, "no fault was ever noticed"
    assert total["length"] > 10 * total["error"], "others suffer"
    assert total["engine stopped"] <= NUM_RUNS // 4


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_without_the_check_such_faults_do_reach_answers(
    fault: Callable[[Engine, random.Random], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def see_nothing(self: BlockTags, chunks: Any) -> list[int]:
        return []

    monkeypatch.setattr(BlockTags, "find_mismatches", see_nothing)
    num_wrong = 0
    for seed in range(NUM_RUNS):
        try:
            live(seed, fault, engine_of())
        except AssertionError:
            num_wrong += 1
    assert num_wrong > 0


@pytest.mark.slow
def test_without_faults_nothing_is_ever_found() -> None:
    total: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        engine = engine_of(num_blocks=20)
        total += live(seed, lambda engine, rng: True, engine)
        engine.check_invariants()
    assert total["mismatches"] == total["error"] == 0
