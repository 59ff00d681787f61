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
        is_all_posted: Callable[[], bool] = lambda: False,
    ) -> None:
        """``left_over`` gives the records in the journal that an earlier process left; blocking.

        ``is_all_posted`` says whether nothing waits in the journal. What was settled here and is neither in
        the journal nor in the ledger for as long as a lease lasts will never be there, and is forgotten.
        """
        self._budgets = budgets
        self._book = book
        self._gateway_id = gateway_id
        self._config = config
        self._clock_us = clock_us
        self._read_left_over = left_over
        self._is_all_posted = is_all_posted
        self._num_missed: dict[str, int] = {}
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
            missed: dict[str, int] = {}
            for one in self._budgets.tracked:
                missed |= await self._renew(one)
            self._num_missed = missed
        except StoreError as error:
            _log.warning("budgets could not be read: %s", error)

    async def _renew(self, one: TrackedBudget) -> dict[str, int]:
        """Returns how often each settled request has been missed in the ledger and the journal."""
        may_be_missed = set(one.window.pending) if self._is_all_posted() else set()
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
        missed = {each: self._num_missed.get(each, 0) + 1 for each in may_be_missed if each in window.pending}
        for request_id, num_missed in missed.items():
            if num_missed * self._config.refresh_s >= self._config.lease_s:
                _log.warning("request %s: what it cost never reached the ledger", request_id)
                window.drop(request_id)
        return missed

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
