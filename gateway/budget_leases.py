"""Keeps the budgets of the gateway in step with the store: which there are, and what of each is held here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from billing.budgets import BudgetBook
from billing.store import StoreError
from billing.usage import UsageRecord
from gateway.budgets import Budgets, TrackedBudget
from gateway.config import BudgetsConfig

_log = logging.getLogger(__name__)

_MICROS = 1_000_000
_RETRY_S = 0.2
"""Between two tries to learn of the budgets at all: everybody waits for it."""


class BudgetLeases:
    """Renews every lease again and again. Belongs to one event loop; start once, stop once."""

    def __init__(
        self,
        budgets: Budgets,
        book: BudgetBook,
        gateway_id: str,
        config: BudgetsConfig,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
        left_over: Callable[[], list[UsageRecord]] = list,
    ) -> None:
        """``left_over`` gives the records in the journal that an earlier process left; blocking."""
        self._budgets = budgets
        self._book = book
        self._gateway_id = gateway_id
        self._config = config
        self._clock_us = clock_us
        self._read_left_over = left_over
        self._left_over: list[UsageRecord] = []
        self._is_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the budgets, and what was charged, before the first request."""
        self._left_over = await asyncio.to_thread(self._read_left_over)
        await self.refresh()
        self._task = asyncio.create_task(self._keep_refreshing())

    async def stop(self) -> None:
        """Stop renewing. Leases are given back by :meth:`release`, when all that was settled is posted."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def release(self) -> None:
        """Give back what is held here. Blocking; a store that does not answer lets the leases run out."""
        try:
            self._book.release(self._gateway_id)
        except StoreError as error:
            _log.warning("budget leases could not be given back, they run out: %s", error)

    def want(self) -> None:
        """Renew soon: a budget is short here while others hold part of it."""
        self._is_wanted.set()

    async def refresh(self) -> None:
        """Read which budgets there are and renew all leases. What cannot be read is tried again next time."""
        try:
            budgets = await asyncio.to_thread(self._book.list_budgets)
            self._budgets.replace(budgets, self._clock_us())
            self._budgets.recall(self._left_over)
            self._left_over = []
            for one in self._budgets.tracked:
                await self._renew(one)
        except StoreError as error:
            _log.warning("budgets could not be read: %s", error)

    async def _renew(self, one: TrackedBudget) -> None:
        window = one.window_at(self._clock_us())
        free_nanos = window.free_nanos if one.has_lease else 0
        window.held_nanos = window.used_nanos + free_nanos  # no more is committed until the answer is there
        lease = await asyncio.to_thread(
            self._book.lease,
            one.budget,
            window.period,
            self._gateway_id,
            used_nanos=window.reserved_nanos + free_nanos,
            pending=dict(window.pending),
            expires_after_us=int(self._config.lease_s * _MICROS),
        )
        one.has_lease = True
        window.learn(lease)

    async def _keep_refreshing(self) -> None:
        while True:
            try:
                are_known = self._budgets.are_known
                wait_s = self._config.refresh_s if are_known else min(_RETRY_S, self._config.refresh_s)
                async with asyncio.timeout(wait_s):
                    await self._is_wanted.wait()
            except TimeoutError:
                pass
            self._is_wanted.clear()
            await self.refresh()
