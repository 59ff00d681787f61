"""Budgets at the door: what a request may come to cost is reserved before it runs, and settled exactly.

All of it is integers in memory. For each budget the gateway may commit as much as it holds of the window
(:mod:`billing.budgets`), and at any time

    reserved by requests that run + settled and perhaps not in the ledger yet  <=  held

as far as requests cost no more than was reserved for them. The longest answer is reserved in full; the prompt
is estimated by its size, at the share of cached tokens that the account's requests have had. So a hard budget
is overshot by no more than what the prompts in flight, when it ran out, cost beyond their estimates, and
never by an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from billing.budgets import Budget, Lease, room_of
from billing.money import format_nanos, line_nanos
from billing.periods import MICROS_PER_SECOND, Period, instant_text
from billing.rates import Charge, NoRateError, RateBook
from billing.usage import UsageRecord
from gateway.errors import Reason, Refusal, accounts_unavailable
from gateway.limits import Demand

_log = logging.getLogger(__name__)

_WHOLE = 1 << 10
_SMOOTHING = 3
"""A request moves the expected share of cached tokens by an eighth of the way to its own."""


class Window:
    """What this gateway has committed of one window of a budget."""

    __slots__ = ("charged_nanos", "end_us", "held_nanos", "is_warned", "limit_nanos", "num_others",
                 "others_nanos", "pending", "pending_nanos", "period", "reserved_nanos")  # fmt: skip

    def __init__(self, period: Period, limit_nanos: int, num_others: int = 0) -> None:
        """A window that has just begun, or of which nothing is known yet."""
        self.period = period
        self.end_us = period.end_us
        self.limit_nanos = limit_nanos
        self.charged_nanos = 0
        self.others_nanos = 0
        self.num_others = num_others
        self.held_nanos = room_of(limit_nanos, num_others)
        self.reserved_nanos = 0
        self.pending: dict[str, int] = {}
        self.pending_nanos = 0
        self.is_warned = False

    @property
    def used_nanos(self) -> int:
        return self.reserved_nanos + self.pending_nanos

    @property
    def free_nanos(self) -> int:
        """What may be committed while the lease is being renewed: with others, not all that is held."""
        free_nanos = max(self.held_nanos - self.used_nanos, 0)
        return free_nanos if self.num_others == 0 else free_nanos // 2

    def add(self, request_id: str, nanos: int) -> None:
        self.pending[request_id] = nanos
        self.pending_nanos += nanos

    def drop(self, request_id: str) -> None:
        """It is in the ledger, or will never be."""
        self.pending_nanos -= self.pending.pop(request_id, 0)

    def learn(self, lease: Lease) -> None:
        """Take over what the ledger has, and what may be held from now on."""
        for request_id in lease.posted:
            self.drop(request_id)
        self.limit_nanos = lease.limit_nanos
        self.charged_nanos = lease.charged_nanos
        self.others_nanos = lease.others_nanos
        self.num_others = lease.num_others
        self.held_nanos = lease.held_nanos


class TrackedBudget:
    """A budget and its present window."""

    __slots__ = ("budget", "has_lease", "window")

    def __init__(self, budget: Budget, now_us: int) -> None:
        self.budget = budget
        self.has_lease = False
        self.window = Window(budget.window(now_us), 0)

    def covers(self, token_id: str) -> bool:
        return not self.budget.token_id or self.budget.token_id == token_id

    def window_at(self, at_us: int) -> Window:
        """The window that ``at_us`` is in; a new one begins with nothing charged."""
        window = self.window
        if window.end_us is not None and at_us >= window.end_us:
            window = Window(self.budget.window(at_us), self.budget.limit_nanos, window.num_others)
            self.window = window
        return window


class BudgetHold:
    """What one request has reserved in each budget that covers it."""

    __slots__ = ("_is_open", "_nanos", "_owner", "_windows")

    def __init__(self, owner: Budgets, windows: Sequence[Window], nanos: int) -> None:
        self._owner = owner
        self._windows = windows
        self._nanos = nanos
        self._is_open = True

    def served(self) -> None:
        """Money stays reserved until it is known how much it was."""

    def settle(self, record: UsageRecord, charge: Charge) -> None:
        """Also later than :meth:`release`. What a record of another window costs is the ledger's to say."""
        self._owner.observe(record)
        for window in self._windows:
            window.add(record.request_id, charge.amount_nanos)
        self.release()

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            for window in self._windows:
                window.reserved_nanos -= self._nanos


class Budgets:
    """Admits requests within budgets. Belongs to one event loop; costs one look-up where there is no budget.

    ``wants_lease`` is called when a budget is short here while other gateways hold part of it.
    """

    def __init__(self, rate_book: RateBook, wants_lease: Callable[[], None] = lambda: None) -> None:
        self._rate_book = rate_book
        self._wants_lease = wants_lease
        self._by_account: dict[str, list[TrackedBudget]] = {}
        self._cached_shares: dict[tuple[str, str], int] = {}
        self._is_loaded = False

    @property
    def are_known(self) -> bool:
        """Whether the budgets have been read; until then nobody is let in."""
        return self._is_loaded

    @property
    def tracked(self) -> list[TrackedBudget]:
        return [one for budgets in self._by_account.values() for one in budgets]

    def replace(self, budgets: Sequence[Budget], now_us: int) -> None:
        """These are the budgets from now on; those that stay keep what they have committed."""
        known = {one.budget.id: one for one in self.tracked}
        by_account: dict[str, list[TrackedBudget]] = {}
        for budget in budgets:
            one = known.get(budget.id)
            if one is None or one.budget.since_us != budget.since_us:
                one = TrackedBudget(budget, now_us)
            elif budget.limit_nanos < one.budget.limit_nanos:
                one.has_lease = False  # what is held may be more than there is now
            one.budget = budget
            by_account.setdefault(budget.account_id, []).append(one)
        self._by_account = by_account
        covered = self._by_account.keys()
        self._cached_shares = {key: x for key, x in self._cached_shares.items() if key[0] in covered}
        self._is_loaded = True

    def recall(self, records: Iterable[UsageRecord]) -> None:
        """These were settled before this process began, and may not be in the ledger yet."""
        for record in records:
            for one in self._by_account.get(record.account_id, ()):
                window = one.window
                is_in_window = record.started_at_us >= (window.period.start_us or 0)
                if one.covers(record.token_id) and is_in_window:
                    window.add(record.request_id, self._price(record))

    def _price(self, record: UsageRecord) -> int:
        try:
            return self._rate_book.price(record).amount_nanos
        except NoRateError:
            return 0

    def reserve(self, demand: Demand) -> BudgetHold | None:
        """Reserve what the request may cost in all budgets that cover it; None where there is none.

        Raises:
            Refusal: 429, code 3036, naming the budget and when there will be more of it; 3040 while the rest
                of it is with other gateways; 503 while budgets are not known.
        """
        tracked = self._by_account.get(demand.account_id)
        if tracked is None:
            if not self._is_loaded:
                raise accounts_unavailable()
            return None
        nanos = self.estimate_nanos(demand)
        windows: list[Window] = []
        for one in tracked:
            if one.covers(demand.token_id):
                window = one.window_at(demand.started_at_us)
                if window.used_nanos + nanos > window.held_nanos:
                    self._refuse_or_warn(one, window, nanos, demand.started_at_us)
                windows.append(window)
        for window in windows:
            window.reserved_nanos += nanos
        return BudgetHold(self, windows, nanos) if windows else None

    def estimate_nanos(self, demand: Demand) -> int:
        """What the request is expected to cost at most: see the module."""
        try:
            card = self._rate_book.card_for(demand.model, demand.started_at_us, demand.account_id)
        except NoRateError:
            return 0
        share = self._cached_shares.get((demand.account_id, demand.model), 0)
        num_cached = demand.max_prompt_tokens * share // _WHOLE
        return (
            line_nanos(demand.max_prompt_tokens - num_cached, card.input.micros_per_million)
            + line_nanos(num_cached, card.cached_input.micros_per_million)
            + line_nanos(demand.max_completion_tokens, card.output.micros_per_million)
        )

    def observe(self, record: UsageRecord) -> None:
        """Learn how much of the account's prompts is cached."""
        if record.prompt_tokens:
            key = (record.account_id, record.model)
            expected = self._cached_shares.get(key, 0)
            found = record.cached_prompt_tokens * _WHOLE // record.prompt_tokens
            self._cached_shares[key] = expected + ((found - expected) >> _SMOOTHING)

    def _refuse_or_warn(self, one: TrackedBudget, window: Window, nanos: int, at_us: int) -> None:
        budget = one.budget
        if budget.action == "warn":
            if not window.is_warned and window.charged_nanos + window.used_nanos + nanos > window.limit_nanos:
                window.is_warned = True
                _log.warning("%s is spent; requests go on", _name(one.budget, window))
            return
        left = window.limit_nanos - window.charged_nanos - window.pending_nanos
        is_elsewhere = nanos <= left - window.reserved_nanos and window.others_nanos > 0
        if is_elsewhere or not one.has_lease:
            self._wants_lease()
            raise Refusal(
                Reason.CAPACITY,
                f"Capacity temporarily exceeded: the rest of {_name(budget, window)} is being shared out, "
                "please try again.",
                retry_after_s=1,
            )
        if nanos <= left:
            raise Refusal(
                Reason.BUDGET,
                f"the rest of {_name(budget, window)} is reserved by requests that are running, "
                "please try again when they have ended",
                retry_after_s=1,
            )
        raise _spent(budget, window, at_us)


def _spent(budget: Budget, window: Window, at_us: int) -> Refusal:
    retry_after_s, when = None, "it is not renewed by itself"
    if budget.period == "credit":
        when = "it is renewed when the account is topped up"
    elif window.end_us is not None:
        retry_after_s = max(-(-(window.end_us - at_us) // MICROS_PER_SECOND), 1)
        when = f"it is renewed at {instant_text(window.end_us)[:19]}Z"
    return Refusal(
        Reason.BUDGET,
        f"this request would go beyond {_name(budget, window)}; {when}",
        retry_after_s=retry_after_s,
        headers=(("x-should-retry", "false"),),
    )


def _name(budget: Budget, window: Window) -> str:
    whose = "the API token" if budget.token_id else "the account"
    if budget.period == "credit":
        return f"the prepaid credit of {whose}"
    return f"the {budget.period} budget of {whose} ({format_nanos(window.limit_nanos)})"
