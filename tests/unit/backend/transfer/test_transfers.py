"""A prompt computed by one engine and answered by another, over real links, and all that can go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from backend.transfer.counters import TransferCounters
from backend.transfer.fetching import Fetcher
from backend.transfer.prompts import Prompt
from tests.support.fake_engine import VOCAB_SIZE
from tests.support.fake_model import alone
from tests.support.transfer_pair import TransferReplica, prompt_of, settled, start_replica
from tests.support.waiting import eventually

Pair = tuple[TransferReplica, TransferReplica]


@pytest.fixture(params=["memory", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        links = (request.param,)
        yield await start_replica(stack, links=links), await start_replica(stack, links=links)


async def test_an_answer_is_the_same_and_nothing_is_left(
    pair: Pair,
) -> None:
    source, target = pair
    for length in (1, 15, 16, 17, 100, 333):
        prompt = prompt_of(length, seed=length)
        fetch = await target.bring(source, prompt)
        assert await target.answer(prompt, fetch) == alone(prompt, 8, VOCAB_SIZE)
        assert target.last_cached == 0, "computed for this request, not found in a cache"
        fetch.close()
    assert target.counters.num_blocks_in == source.counters.num_blocks_out == 1 + 6 + 20
    assert not target.counters.failures
    await settled(source, target)


async def test_the_other_replicas_cache_is_what_counts(pair: Pair) -> None:
    source, target = pair
    prompt = prompt_of(100)
    await source.answer(prompt)
    fetch = await target.bring(source, prompt)
    assert fetch.told_cached_tokens == 96
    await target.answer(prompt, fetch)
    assert target.last_cached == 96
    fetch.close()
    stats = target.engine.engine.stats()
    assert stats.computed_tokens == 4 + 7, "only what is behind the last full block"
    longer = prompt + prompt_of(100, seed=1)
    fetch = await target.bring(source, longer)
    await target.answer(longer, fetch)
    fetch.close()
    assert target.counters.num_blocks_in == 6 + 6, "what is here already does not travel"
    await settled(source, target)


async def test_a_prompt_that_is_here_needs_no_other(pair: Pair) -> None:
    source, target = pair
    prompt = prompt_of(50)
    await target.answer(prompt)
    fetch = await target.bring(source, prompt)
    await target.answer(prompt, fetch)
    assert target.last_cached == 48
    fetch.close()
    assert source.counters.num_started_out == 0


async def test_nobody_there_means_computing_here(pair: Pair) -> None:
    source, target = pair
    place = source.place
    await source.service.close()
    prompt = prompt_of(80)
    fetch = target.fetcher.fetch(Prompt(prompt))
    await fetch.run(*place)
    assert await target.answer(prompt, fetch) == alone(prompt, 8, VOCAB_SIZE)
    fetch.close()
    assert sum(target.counters.failures.values()) == 1
    await settled(source, target)


@pytest.mark.parametrize("fault", ["stall", "kill"])
async def test_a_replica_that_is_lost_on_the_way_costs_time_only(pair: Pair, fault: str) -> None:
    source, target = pair
    prompt = prompt_of(400)
    fetch = target.fetcher.fetch(Prompt(prompt))
    running = asyncio.create_task(fetch.run(*source.place))
    await eventually(lambda: target.counters.num_blocks_in > 0, interval_s=0.0005)
    if fault == "stall":
        source.engine.is_stalled = True
    else:
        await source.engine.stop()
    await running
    assert 0 < target.counters.num_blocks_in < 24
    assert await target.answer(prompt, fetch) == alone(prompt, 8, VOCAB_SIZE)
    assert target.last_cached == 0
    fetch.close()
    source.engine.is_stalled = False
    await settled(target, *([source] if fault == "stall" else []))


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    pair: Pair,
) -> None:
    source, target = pair
    for delay_s in (0.0, 0.002, 0.004, 0.01, 0.02):
        fetch = target.fetcher.fetch(Prompt(prompt_of(400, seed=int(delay_s * 10000))))
        running = asyncio.create_task(fetch.run(*source.place))
        await asyncio.sleep(delay_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        fetch.close()
    await settled(source, target)
    prompt = prompt_of(90, seed=9)
    fetch = await target.bring(source, prompt)
    assert await target.answer(prompt, fetch) == alone(prompt, 8, VOCAB_SIZE), "slots were lost"
    fetch.close()


async def test_a_sequence_that_never_comes_is_not_waited_for(
    pair: Pair,
) -> None:
    source, target = pair
    fetch = await target.bring(source, prompt_of(100))
    assert target.engine.engine.stats().num_held_blocks == 6
    await settled(source, target)
    fetch.close()


async def test_records_that_were_changed_on_the_way_are_not_used(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    store = source.engine.engine.transfers
    assert store is not None
    slot_of = store._exchange.slot
    written = 0

    def spoil(number: int) -> memoryview:
        nonlocal written
        written += 1
        memory = slot_of(number)
        if written == 3:
            asyncio.get_running_loop().call_soon(lambda: memory.__setitem__(200, memory[200] ^ 1))
        return memory

    monkeypatch.setattr(store._exchange, "slot", spoil)
    prompt = prompt_of(200)
    fetch = await target.bring(source, prompt)
    assert target.counters.failures["corrupt"] == 1
    assert await target.answer(prompt, fetch) == alone(prompt, 8, VOCAB_SIZE)
    fetch.close()
    await settled(source, target)


async def test_who_does_not_know_the_secret_gets_nothing() -> None:
    async with AsyncExitStack() as stack:
        source, other = await start_replica(stack), await start_replica(stack)
        counters = TransferCounters()
        stranger = Fetcher(other.fetcher.desk, other.fetcher.config, "another secret", counters)
        fetch = stranger.fetch(Prompt(prompt_of(100)))
        await fetch.run(*source.place)
        assert counters.failures["lost"] == 1
        assert source.engine.engine.stats().num_requests == 0
        fetch.close()
