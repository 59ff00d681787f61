"""Tiers below a KV cache: nothing lost, nothing foreign, the same answers, whatever the disk does."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig, TierConfig
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest, TierStats, TokenOutput
from tests.support.fake_engine import EOS_TOKEN_ID, FakeRunner

BLOCK_BYTES = 512  # of the fake model's 16 tokens
RECORD_BYTES = BLOCK_BYTES + 300
GIB = 2**30


def engine_with(*, num_blocks: int = 24, **tiers: Any) -> Engine:
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path="fake", served_as="fake", max_model_len=320),
        cache=CacheConfig(num_blocks=num_blocks, tiers=TierConfig(**tiers)),
        scheduler=SchedulerConfig(max_tokens_per_step=64, max_running=4, max_waiting=64),
    )
    return Engine(FakeRunner(), config, clock_s=time.monotonic, draw_seed=itertools.count(1).__next__)


@contextmanager
def tiered(**tiers: Any) -> Iterator[Engine]:
    engine = engine_with(**tiers)
    try:
        yield engine
    finally:
        if engine.tiering is not None:
            engine.tiering.close()


def request(number: int, prompt: list[int], salt: bytes = b"") -> SequenceRequest:
    return SequenceRequest(
        sequence_id=number,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
        cache_salt=salt,
    )


def run(engine: Engine) -> dict[int, TokenOutput]:
    """Work until nothing is left; tokens of each sequence, with what was cached."""
    tokens: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    until_s = time.monotonic() + 20
    while engine.has_work:
        assert time.monotonic() < until_s
        engine.step()
        for output in engine.take_outputs():
            assert output.finish_reason != "error", output.message
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
            cached[output.sequence_id] = output.cached_prompt_tokens
    engine.check_invariants()
    return {
        number: TokenOutput(sequence_id=number, token_ids=own, cached_prompt_tokens=cached[number])
        for number, own in tokens.items()
    }


def ask(engine: Engine, number: int, prompt: list[int], salt: bytes = b"") -> TokenOutput:
    engine.submit(request(number, prompt, salt))
    return run(engine)[number]


def prompt_of(seed: int, num_tokens: int = 200) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(EOS_TOKEN_ID) for _ in range(num_tokens)]


def save_all(engine: Engine) -> None:
    tiering = engine.tiering
    assert tiering is not None
    assert tiering._tiers.disk is not None
    while tiering.write_back(is_idle=True):
        assert tiering._tiers.disk.drain(5)
    assert tiering._tiers.disk.drain(5)


def stats(engine: Engine) -> TierStats:
    found = engine.stats().tiers
    assert found is not None
    return found


def tier_file(directory: Path) -> Path:
    (file,) = directory.glob("r0/*.kvblocks")
    return file


def test_what_was_evicted_comes_back_from_memory_with_the_same_answer() -> None:
    with tiered(host_gib=1.0) as engine:
        cold = ask(engine, 1, prompt_of(1))
        for number in range(2, 6):
            ask(engine, number, prompt_of(number))
        warm = ask(engine, 7, prompt_of(1))
        assert (cold.cached_prompt_tokens, warm.cached_prompt_tokens) == (0, 192)
        assert warm.token_ids == cold.token_ids
        found = stats(engine)
        assert found.hits == found.num_from_host * 16 > 0
        assert engine.stats().num_held_blocks == 0


def test_another_account_finds_nothing() -> None:
    with tiered(host_gib=1.0) as engine:
        ask(engine, 1, prompt_of(1), b"one")
        for number in range(2, 6):
            ask(engine, number, prompt_of(number))
        assert ask(engine, 7, prompt_of(1), b"another").cached_prompt_tokens == 0
        assert stats(engine).hits == 0


def test_a_restart_finds_what_was_saved_even_without_a_stop(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_gib": 0.01, "path": str(tmp_path)}
    first = engine_with(**disk)
    cold = ask(first, 1, prompt_of(1))
    save_all(first)
    assert first.tiering is not None
    assert first.tiering._tiers.disk is not None
    os.close(first.tiering._tiers.disk._disk._descriptor)  # as a kill does: nothing is said, the lock goes
    with tiered(**disk) as second:
        warm = ask(second, 1, prompt_of(1))
        assert (warm.cached_prompt_tokens, warm.token_ids) == (192, cold.token_ids)
        assert stats(second).num_from_disk == 12


def test_a_stop_saves_what_was_not_saved_yet(tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"host_gib": 0.01, "disk_gib": 0.01, "path": str(tmp_path)}
    with tiered(**tiers) as first:
        answers = [ask(first, number, prompt_of(number)).token_ids for number in range(5)]
    with tiered(**tiers) as second:
        for number in range(5):
            warm = ask(second, number, prompt_of(number))
            assert (warm.cached_prompt_tokens, warm.token_ids) == (192, answers[number])


def test_a_corrupt_block_is_noticed_and_computed_again(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_gib": 0.01, "path": str(tmp_path)}
    with tiered(**disk) as first:
        cold = ask(first, 1, prompt_of(1))
    data = bytearray(tier_file(tmp_path).read_bytes())
    slot = len(data) // 12
    for at in range(12):  # one bit in each block, somewhere else each time
        data[at * slot + 140 + 31 * at] ^= 1 << (at % 8)
    tier_file(tmp_path).write_bytes(data)
    with tiered(**disk) as second:
        again = ask(second, 1, prompt_of(1))
        assert (again.cached_prompt_tokens, again.token_ids) == (0, cold.token_ids)
        assert stats(second).num_corrupt > 0
        assert stats(second).num_ended_early == 1


def test_a_torn_file_is_as_good_as_what_is_whole_of_it(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_gib": 0.01, "path": str(tmp_path)}
    with tiered(**disk) as first:
        cold = ask(first, 1, prompt_of(1))
    with tier_file(tmp_path).open("r+b") as file:
        file.truncate(tier_file(tmp_path).stat().st_size - 100)
    with tiered(**disk) as second:
        again = ask(second, 1, prompt_of(1))
        assert again.token_ids == cold.token_ids
        assert again.cached_prompt_tokens < 192


def test_a_full_disk_costs_no_request(tmp_path: Path) -> None:
    with tiered(disk_gib=0.01, path=str(tmp_path), retry_after_s=0.05) as engine:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
        try:
            answers = [ask(engine, number, prompt_of(number)).token_ids for number in range(6)]
            save_all(engine)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(answers) == 6
        assert stats(engine).num_disk_failures > 0
        time.sleep(0.06)  # what is full is looked at again
        assert stats(engine).is_disk_writable
        save_all(engine)
        assert stats(engine).num_disk_bytes > 4000


def test_a_directory_that_cannot_be_used_costs_no_start(tmp_path: Path) -> None:
    (tmp_path / "r0").write_text("a file, not a directory")
    engine = engine_with(disk_gib=0.01, path=str(tmp_path))
    assert engine.tiering is None
    assert ask(engine, 1, prompt_of(1)).token_ids


def test_a_disk_tier_without_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache\.tiers\.path"):
        engine_with(disk_gib=1.0)


def test_a_disk_that_is_in_use_is_left_to_its_owner(tmp_path: Path) -> None:
    with tiered(disk_gib=0.01, path=str(tmp_path)):
        assert engine_with(disk_gib=0.01, path=str(tmp_path)).tiering is None


def test_a_disk_that_does_not_answer_delays_a_request_by_its_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk: dict[str, Any] = {"disk_gib": 0.01, "path": str(tmp_path)}
    with tiered(**disk) as first:
        cold = ask(first, 1, prompt_of(1))
    pread = os.pread
    with tiered(**disk, promotion_timeout_s=0.1) as second:

        def slow(descriptor: int, count: int, offset: int) -> bytes:
            time.sleep(0.3)
            return pread(descriptor, count, offset)

        monkeypatch.setattr(os, "pread", slow)
        again = ask(second, 1, prompt_of(1))
        assert (again.cached_prompt_tokens, again.token_ids) == (0, cold.token_ids)
        assert stats(second).num_ended_early == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_end_with_the_answers_of_a_cold_engine(seed: int, tmp_path: Path) -> None:
    """Shared prefixes, three accounts, aborts, a cache and tiers far too small, and a disk that fails."""
    draw = random.Random(seed)
    stems = [prompt_of(100 + number, 160) for number in range(5)]
    tiers: dict[str, object] = {"max_blocks_per_step": 7, "max_queue_mib": 0.01}
    if seed % 3 != 1:
        tiers["host_gib"] = 20 * BLOCK_BYTES / GIB
    if seed % 3 != 2:
        tiers |= {"disk_gib": 30 * RECORD_BYTES / GIB, "path": str(tmp_path), "retry_after_s": 0.001}
    expected: dict[tuple[int, ...], list[int]] = {}
    with tiered(num_blocks=30, **tiers) as engine, pytest.MonkeyPatch.context() as patch:
        pwrite = os.pwrite

        def failing(*args: object) -> int:
            if draw.random() < 0.1:
                raise OSError(errno.ENOSPC, "full")
            return pwrite(*args)  # type: ignore[arg-type]

        patch.setattr(os, "pwrite", failing)
        for number in itertools.count(step=4):
            if number > 160:
                break
            asked: dict[int, tuple[int, ...]] = {}
            for own in range(number, number + 4):
                stem = draw.choice(stems)
                prompt = stem[: draw.randrange(1, len(stem))] + prompt_of(draw.randrange(8), 20)
                engine.submit(request(own, prompt, bytes([draw.randrange(3)])))
                asked[own] = tuple(prompt)
            engine.step()
            if draw.random() < 0.3:
                victim = draw.choice(list(asked))
                engine.abort(victim)
                asked.pop(victim)
            found = run(engine)
            if engine.tiering is not None:
                engine.tiering.write_back(is_idle=True)
            for own, key in asked.items():
                if key not in expected:
                    expected[key] = ask(engine_with(), 1, list(key)).token_ids
                assert found[own].token_ids == expected[key][-len(found[own].token_ids) :]
        assert stats(engine).hits > 0
        assert engine.stats().num_held_blocks == 0
        assert engine.stats().num_kv_mismatches == 0
