"""Blocks that leave one engine and enter another: greedy answers stay the same, and so do the books."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from backend.engine.block_pool import OutOfBlocksError
from backend.engine.block_store import BlockStore, StaleBlockError
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.prefix_cache import block_digest, root_digest
from tests.support.engine_driver import engine_on, generate
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

BLOCK = 16
NUM_BLOCKS = 24
start = partial(engine_on, max_model_len=192, num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module", params=["llama", "kimi"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write: dict[str, Callable[[Path], object]] = {"llama": write_tiny_llama, "kimi": write_tiny_kimi}
    write[request.param](directory)
    return directory


def store_of(engine: Engine) -> BlockStore:
    assert engine.store is not None
    return engine.store


def prompt_of(length: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def digests_of(prompt: list[int], salt: bytes = b"") -> list[bytes]:
    digests = [root_digest(salt)]
    for start_at in range(0, len(prompt) - BLOCK + 1, BLOCK):
        digests.append(block_digest(digests[-1], prompt[start_at : start_at + BLOCK]))
    return digests[1:]


def num_unused(engine: Engine) -> int:
    stats = engine.stats()
    return stats.num_free_blocks + stats.num_cached_blocks


def test_blocks_of_one_engine_serve_another_with_the_same_answer(checkpoint: Path) -> None:
    source, target = start(checkpoint), start(checkpoint)
    prompt = prompt_of(5 * BLOCK + 3)
    expected = generate(source, [prompt], max_tokens=12)
    held = [hold for digest in digests_of(prompt) if (hold := store_of(source).hold(digest)) is not None]
    assert len(held) == 5
    rows = store_of(source).export(held)
    assert store_of(source).layout == store_of(target).layout

    taken = store_of(target).put_in([hold.digest for hold in held], rows)
    assert num_unused(target) == NUM_BLOCKS - 5
    target.check_invariants()
    assert generate(target, [prompt], max_tokens=12) == expected
    assert target.stats().cached_prompt_tokens == 5 * BLOCK
    store_of(source).release(held)
    store_of(target).release(taken)
    for engine in (source, target):
        engine.check_invariants()
        assert num_unused(engine) == NUM_BLOCKS


def test_layers_can_leave_one_by_one(checkpoint: Path) -> None:
    engine = start(checkpoint)
    prompt = prompt_of(2 * BLOCK + 1)
    generate(engine, [prompt], max_tokens=1)
    store = store_of(engine)
    held = [hold for digest in digests_of(prompt) if (hold := store.hold(digest)) is not None]
    parts = [store.export(held, layer, 1) for layer in range(store.layout.num_layers)]
    assert torch.equal(torch.cat(parts, dim=1), store.export(held))
    store.release(held)


def test_what_is_there_already_is_held_and_not_written_again(checkpoint: Path) -> None:
    engine = start(checkpoint)
    prompt = prompt_of(3 * BLOCK + 1)
    answer = generate(engine, [prompt], max_tokens=4)
    digests = digests_of(prompt)
    junk = torch.full((3, store_of(engine).layout.block_bytes), 7, dtype=torch.uint8)
    held = store_of(engine).put_in(digests, junk)
    store_of(engine).release(held)
    assert generate(engine, [prompt], max_tokens=4) == answer
    engine.check_invariants()


def test_a_block_that_was_taken_for_something_else_is_not_exported(checkpoint: Path) -> None:
    engine = start(checkpoint)
    prompt = prompt_of(BLOCK + 1)
    generate(engine, [prompt], max_tokens=1)
    store = store_of(engine)
    hold = store.hold(digests_of(prompt)[0])
    assert hold is not None
    engine._tags.write(hold.block, hold.tag + 1)
    with pytest.raises(StaleBlockError):
        store.export([hold])
    store.release([hold])


def test_without_room_nothing_is_put_in(checkpoint: Path) -> None:
    engine = start(checkpoint)
    store = store_of(engine)
    count = NUM_BLOCKS + 1
    rows = torch.zeros((count, store.layout.block_bytes), dtype=torch.uint8)
    digests = digests_of(prompt_of(count * BLOCK))
    with pytest.raises(OutOfBlocksError):
        store.put_in(digests, rows)
    assert store.num_held == 0
    engine.check_invariants()
    assert num_unused(engine) == NUM_BLOCKS


def test_contents_stay_with_the_salt_they_were_computed_for(checkpoint: Path) -> None:
    engine = start(checkpoint)
    prompt = prompt_of(2 * BLOCK + 1)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.submit(
        SequenceRequest(sequence_id=1, prompt_token_ids=prompt, sampling=sampling, cache_salt=b"one")
    )
    while engine.has_work:
        engine.step()
    assert store_of(engine).has(digests_of(prompt, b"one")[0])
    assert not store_of(engine).has(digests_of(prompt, b"other")[0])
