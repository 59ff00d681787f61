"""A small replica, and requests to send to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from simulator.requests import SimulatedRequest
from simulator.step_time import ReplicaProfile, StepTime

BLOCK = 16


@pytest.fixture
def profile() -> ReplicaProfile:
    return ReplicaProfile(
        name="small",
        step_time=StepTime(base_s=0.01, decode_s=0.001, prefill_s=0.0001),
        kv_tokens=64 * BLOCK,
        max_running=4,
        max_tokens_per_step=64,
    )


def request(
    index: int, blocks: Sequence[int], *, at_s: float = 0.0, extra: int = 1, output: int = 4, key: str = ""
) -> SimulatedRequest:
    """A prompt of the named blocks and ``extra`` tokens."""
    return SimulatedRequest(
        index=index,
        arrival_s=at_s,
        account="account",
        key=key or f"key-{index}",
        digests=[b"%d" % block for block in blocks],
        prompt_tokens=len(blocks) * BLOCK + extra,
        output_tokens=output,
    )


class Listed:
    """A workload of given requests, in order of arrival."""

    block_tokens = BLOCK

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        self._requests = iter(requests)

    def next_arrival(self) -> SimulatedRequest | None:
        return next(self._requests, None)

    def next_turn(self, answered: SimulatedRequest, now_s: float) -> None:
        return None
