"""Plays prompts at their times, whatever becomes of earlier ones: an open loop with a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtest.exchange import Exchange
from loadtest.replay.prompts import Prompt

Send = Callable[[Prompt], Awaitable[Exchange]]


@dataclass(frozen=True)
class Played:
    """A request that was made. ``due_s`` counts from the start of the run; ``late_s`` is how long the bound
    on requests in flight held it back; ``ttft_s`` counts from when it was due.
    """

    prompt: Prompt
    exchange: Exchange
    due_s: float
    late_s: float

    @property
    def ttft_s(self) -> float:
        return self.exchange.first_s - self.exchange.sent_s + self.late_s


async def play(
    prompts: Sequence[Prompt],
    send: Send,
    *,
    speed: float,
    max_in_flight: int,
    max_duration_s: float,
    progress: Callable[[int], None] = lambda num_done: None,
) -> list[Played]:
    """Send each prompt when the trace says, ``speed`` times as fast; in the order of the trace.

    What would be due after ``max_duration_s`` is left out, as is what could not be sent by then.
    """
    places = asyncio.Semaphore(max_in_flight)
    played: list[Played] = []
    start = time.perf_counter()

    async def one(prompt: Prompt, due_s: float) -> None:
        try:
            late_s = max(0.0, time.perf_counter() - start - due_s)
            played.append(Played(prompt, await send(prompt), due_s, late_s))
            progress(len(played))
        finally:
            places.release()

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            due_s = prompt.entry.timestamp / 1000.0 / speed
            if due_s > max_duration_s:
                break
            await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
            await places.acquire()
            if time.perf_counter() - start > max_duration_s:
                places.release()
                break
            tasks.create_task(one(prompt, due_s))
    return sorted(played, key=lambda each: each.due_s)
