"""Replicas in this process that exchange blocks over real links."""

from __future__ import annotations

import contextlib
import random
from contextlib import AsyncExitStack

from backend.engine.messages import SamplingParams, SequenceRequest
from backend.transfer.counters import TransferCounters
from backend.transfer.fetching import Fetch, Fetcher
from backend.transfer.prompts import Prompt
from backend.transfer.service import TransferService, split_address
from tests.support.fake_engine import EOS_TOKEN_ID
from tests.support.local_engine import LocalEngine, local_config
from tests.support.waiting import eventually

NUM_BLOCKS = 96


class TransferReplica:
    """An engine of the fake model and its links; ``last_cached``: cached tokens of its last answer."""

    def __init__(self, engine: LocalEngine, service: TransferService) -> None:
        self.engine = engine
        self.service = service
        self.last_cached = 0

    @classmethod
    async def start(cls, **transfer: object) -> TransferReplica:
        config = local_config(**transfer)
        engine = LocalEngine(config)
        assert engine.info.exchange is not None
        service = TransferService(config, engine, engine.info.exchange)
        await service.start()
        return cls(engine, service)

    async def stop(self) -> None:
        """As suddenly as a process that is killed."""
        await self.engine.stop()
        await self.service.close()

    @property
    def fetcher(self) -> Fetcher:
        assert self.service.fetcher is not None
        return self.service.fetcher

    @property
    def counters(self) -> TransferCounters:
        return self.service.counters

    @property
    def place(self) -> tuple[str, int]:
        """Where it computes prompts for others."""
        return split_address(self.service.address)

    async def bring(self, source: TransferReplica, prompt: list[int]) -> Fetch:
        """Bring a prompt's blocks from there."""
        fetch = self.fetcher.fetch(Prompt(prompt))
        await fetch.run(*source.place)
        return fetch

    async def answer(self, prompt: list[int], fetch: Fetch | None = None, count: int = 8) -> list[int]:
        """Greedy tokens after the prompt. A reader that is cancelled aborts the sequence."""
        request = SequenceRequest(
            sequence_id=self.engine.new_sequence_id(),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
            lease_id=0 if fetch is None else fetch.lease_id,
            told_cached_tokens=None if fetch is None else fetch.told_cached_tokens,
        )
        stream = self.engine.submit(request)
        tokens: list[int] = []
        try:
            async for output in stream:
                tokens += output.token_ids
                self.last_cached = output.cached_prompt_tokens
        finally:
            stream.abort()
        return tokens


async def start_replica(stack: AsyncExitStack, **transfer: object) -> TransferReplica:
    """A replica for as long as ``stack`` lasts."""
    replica = await TransferReplica.start(**transfer)
    stack.push_async_callback(replica.stop)
    return replica


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids of the fake model."""
    rng = random.Random(seed)
    return [rng.randrange(EOS_TOKEN_ID) for _ in range(length)]


async def settled(*replicas: TransferReplica, timeout_s: float = 5.0) -> None:
    """Until every pool is at its baseline.

    Raises:
        AssertionError: when it does not get there in time.
    """
    with contextlib.suppress(TimeoutError):
        await eventually(lambda: all(map(_is_idle, replicas)), timeout_s=timeout_s, interval_s=0.01)
    for replica in replicas:
        engine = replica.engine.engine
        engine.check_invariants()
        assert engine.store is not None
        assert engine.store.num_held == 0
        assert replica.engine.num_unused == NUM_BLOCKS


def _is_idle(replica: TransferReplica) -> bool:
    stats = replica.engine.engine.stats()
    return stats.num_held_blocks == stats.num_running == stats.num_waiting == 0
