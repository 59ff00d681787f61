"""The daily free neurons of accounts: how many of today's are used, and who is refused when all are.

A day is a UTC day, and a request belongs to the day in which it started, as in every report. The counts of
the day so far come from the ledger when the gateway starts and are looked up again from time to time, because
other gateways may serve the same accounts; in between, every record that is made here adds to them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from billing.periods import MICROS_PER_DAY, MICROS_PER_SECOND, instant_text
from billing.store import StoreError
from gateway.errors import Reason, Refusal
from gateway.limits import Demand

_log = logging.getLogger(__name__)

_E4 = 10_000


class DailyNeurons:
    """Counts used neurons by account. Belongs to one event loop.

    ``allocation_of`` gives an account's free neurons a day (0: none), ``stops`` whether its requests are
    refused when they are used up rather than charged.
    """

    def __init__(
        self,
        allocation_of: Callable[[str], int],
        stops: Callable[[str], bool],
    ) -> None:
        self._allocation_of = allocation_of
        self._stops = stops
        self._day = 0
        self._used_e4: dict[str, int] = {}

    def reserve(self, demand: Demand) -> None:
        """Admit a request as long as something of the day's allocation is left.

        Raises:
            Refusal: 429, code 4006, when nothing is.
        """
        account_id = demand.account_id
        if not self._stops(account_id):
            return
        self._begin_day(demand.started_at_us // MICROS_PER_DAY)
        allocation = self._allocation_of(account_id)
        if self._used_e4.get(account_id, 0) >= allocation * _E4:
            raise _used_up(allocation, demand.started_at_us)

    def draw(self, account_id: str, started_at_us: int, neurons_e4: int) -> int:
        """Count what a request used; returns how much of it the day's free allocation covers.

        Both in ten-thousandths of a neuron. A request of a day that is over finds nothing left of it.
        """
        day = started_at_us // MICROS_PER_DAY
        self._begin_day(day)
        if day != self._day:
            return 0
        used_e4 = self._used_e4.get(account_id, 0)
        self._used_e4[account_id] = used_e4 + neurons_e4
        return max(min(neurons_e4, self._allocation_of(account_id) * _E4 - used_e4), 0)

    def give_back(self, account_id: str, started_at_us: int, neurons_e4: int) -> None:
        """Undo one :meth:`draw`: what it counted was not recorded."""
        if started_at_us // MICROS_PER_DAY == self._day:
            self._used_e4[account_id] = max(self._used_e4.get(account_id, 0) - neurons_e4, 0)

    def learn(self, day_start_us: int, used_e4: Mapping[str, int]) -> None:
        """Take over what the ledger says was used in a day; counts never go down within it."""
        day = day_start_us // MICROS_PER_DAY
        self._begin_day(day)
        if day == self._day:
            for account_id, neurons_e4 in used_e4.items():
                self._used_e4[account_id] = max(self._used_e4.get(account_id, 0), neurons_e4)

    def used_e4(self, account_id: str) -> int:
        """What the account used of the day that is counted now."""
        return self._used_e4.get(account_id, 0)

    def _begin_day(self, day: int) -> None:
        if day > self._day:
            self._day = day
            self._used_e4 = {}


def _used_up(allocation: int, now_us: int) -> Refusal:
    reset_us = (now_us // MICROS_PER_DAY + 1) * MICROS_PER_DAY
    return Refusal(
        Reason.DAILY_NEURONS,
        f"you have used up your daily free allocation of {allocation:,} neurons; "
        f"it is renewed at {instant_text(reset_us)[:19]}Z",
        retry_after_s=-(-(reset_us - now_us) // MICROS_PER_SECOND),
        # Clients of OpenAI and Cloudflare would try again at once: in vain before midnight.
        headers=(("x-should-retry", "false"),),
    )


class NeuronRefresher:
    """Looks up what the ledger knows of the day: before the first request, and every ``refresh_s`` from then
    on. ``read`` is given the start of a day and blocks.
    """

    def __init__(
        self,
        neurons: DailyNeurons,
        read: Callable[[int], Mapping[str, int]],
        *,
        refresh_s: float,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        self._neurons = neurons
        self._read = read
        self._refresh_s = refresh_s
        self._clock_us = clock_us
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._keep_refreshing())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def refresh(self) -> None:
        """Look up once. A ledger that does not answer is asked again next time."""
        day_start_us = self._clock_us() // MICROS_PER_DAY * MICROS_PER_DAY
        try:
            used_e4 = await asyncio.to_thread(self._read, day_start_us)
        except StoreError as error:
            _log.warning("the neurons that were used today could not be read: %s", error)
            return
        self._neurons.learn(day_start_us, used_e4)

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.refresh()
