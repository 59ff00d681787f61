"""Prompts go from replica to replica while replicas are killed, stall, and clients leave."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from backend.engine.client import EngineDiedError, SequenceRefusedError
from backend.transfer.prompts import Prompt
from tests.support.fake_engine import VOCAB_SIZE
from tests.support.fake_model import alone
from tests.support.transfer_pair import TransferReplica, prompt_of, settled

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_REQUESTS = 200
NUM_AT_ONCE = 8
NUM_TOKENS = 8


class Pool:
    """Two replicas that compute prompts and two that answer; any may be replaced at any moment."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.prefill: list[TransferReplica] = []
        self.decode: list[TransferReplica] = []
        self.ends: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    async def start(self) -> None:
        for group, links in ((self.prefill, ("memory", "tcp")), (self.decode, ("memory", "tcp"))):
            for link in links:
                group.append(await new_replica(link))

    async def stop(self) -> None:
        for replica in (*self.prefill, *self.decode):
            self._count(replica)
            await replica.stop()

    async def serve(self, number: int) -> None:
        """One request: brought, answered, perhaps left by its client; tried once more when a replica dies."""
        prompt = prompt_of(self._rng.randrange(20, 400), seed=self._rng.randrange(60))
        leaves_after_s = self._rng.choice([None, None, None, self._rng.random() * 0.05])
        for attempt in ("first", "second", "third"):
            try:
                async with asyncio.timeout(leaves_after_s):
                    tokens = await self._attempt(prompt)
            except TimeoutError:
                self.ends["left"] += 1
                return
            except (EngineDiedError, SequenceRefusedError):
                continue
            assert tokens == alone(prompt, NUM_TOKENS, VOCAB_SIZE), "an answer out of somebody else's blocks"
            self.ends[attempt] += 1
            return
        self.ends["refused"] += 1

    async def _attempt(self, prompt: list[int]) -> list[int]:
        source, target = self._rng.choice(self.prefill), self._rng.choice(self.decode)
        fetch = target.fetcher.fetch(Prompt(prompt))
        try:
            await fetch.run(*source.place)
            return await target.answer(prompt, fetch, NUM_TOKENS)
        finally:
            fetch.close()

    async def disturb(self) -> None:
        """Kill or stall somebody, again and again."""
        while True:
            await asyncio.sleep(0.02 + self._rng.random() * 0.1)
            group = self._rng.choice((self.prefill, self.decode))
            at = self._rng.randrange(len(group))
            if self._rng.random() < 0.3:
                victim = group[at]
                self._count(victim)
                group[at] = await new_replica(self._rng.choice(("memory", "tcp")))
                self.ends["kills"] += 1
                await victim.stop()
            else:
                victim = group[at]
                victim.engine.is_stalled = True
                self.ends["stalls"] += 1
                await asyncio.sleep(self._rng.choice((0.01, 0.05, 0.4)))
                victim.engine.is_stalled = False

    def _count(self, replica: TransferReplica) -> None:
        self.failures += replica.counters.failures
        self.ends["blocks"] += replica.counters.num_blocks_in


async def new_replica(link: str) -> TransferReplica:
    return await TransferReplica.start(
        links=(link,), stall_timeout_s=0.2, lease_s=0.6, transfer_timeout_s=2.0, connect_timeout_s=0.2
    )


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_request_ends_and_every_block_comes_back(seed: int) -> None:
    pool = Pool(random.Random(seed))
    await pool.start()
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def serve(number: int) -> None:
        async with slots:
            await pool.serve(number)

    disturbing = asyncio.create_task(pool.disturb())
    async with asyncio.timeout(60):
        await asyncio.gather(*(serve(number) for number in range(NUM_REQUESTS)))
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    replicas = (*pool.prefill, *pool.decode)
    for replica in replicas:
        replica.engine.is_stalled = False
    await settled(*replicas)
    await pool.stop()
    ends = pool.ends
    assert sum(ends[end] for end in ("first", "second", "third", "left", "refused")) == NUM_REQUESTS
    assert ends["first"] > NUM_REQUESTS / 2
    assert min(ends["kills"], ends["stalls"], ends["left"], ends["blocks"]) > 0
    assert pool.failures, "nothing was disturbed"
