"""The query string of the usage API, decoded strictly, and the cursor of its pages."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import msgspec
from multidict import MultiMapping

from billing.analytics import DIMENSIONS, WIDTHS_US, Dimension, Keyset, Order, UsageFilter
from billing.periods import Period, parse_instant
from billing.usage import STATUSES
from gateway.config import AnalyticsConfig
from gateway.errors import Refusal, bad_input

REQUESTS = "request"

_FILTERS = ("model", "token", "session", "status", "surface")
_PARAMETERS = (
    *_FILTERS,
    *("since", "until", "group_by", "order", "limit", "cursor"),
)
_ORDERS = ("amount", "key")
_MAX_VALUES = 50
_MAX_CURSOR_CHARS = 2_000
_DEFAULT_LIMIT = 100
_QUESTION_CHARS = 16


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked. ``by`` None means single requests. ``after`` continues a page.

    ``question`` is the same for all pages of one question; a cursor of another is refused.
    """

    wanted: UsageFilter
    by: tuple[Dimension, ...] | None
    order: tuple[Order, ...]
    limit: int
    after: Keyset | None
    question: str


def decode_usage_query(
    parameters: MultiMapping[str], account_id: str | None, config: AnalyticsConfig, now_us: int
) -> UsageQuery:
    """The question of a query string.

    Raises:
        Refusal: 400, naming the one wrong parameter.
    """
    for name in parameters:
        if name not in _PARAMETERS:
            raise bad_input(name[:50], f"is unknown; known are {', '.join(_PARAMETERS)}")
    by = _grouping(_single(parameters, "group_by") or "day")
    statuses = _values(parameters, "status")
    unknown = [status for status in statuses if status not in STATUSES]
    if unknown:
        raise bad_input("status", f"{unknown[0][:50]!r} is none of {', '.join(STATUSES)}")
    period = Period(_instant(parameters, "since", now_us), _instant(parameters, "until", now_us))
    if period.start_us is not None and period.end_us is not None and period.end_us <= period.start_us:
        raise bad_input("until", "must be later than since")
    order = _order(_single(parameters, "order"), by)
    question = _question(parameters, account_id, by, order)
    return UsageQuery(
        wanted=UsageFilter(
            account_id=account_id,
            period=period,
            models=_values(parameters, "model"),
            token_ids=_values(parameters, "token"),
            sessions=_values(parameters, "session"),
            surfaces=_values(parameters, "surface"),
            statuses=statuses,
        ),
        by=by,
        order=order,
        limit=_limit(parameters, config.max_page_rows),
        after=_cursor(_single(parameters, "cursor"), by, question),
        question=question,
    )


def encode_cursor(after: Keyset | None, question: str) -> str | None:
    """What a client sends back to go on with this question."""
    if after is None:
        return None
    return base64.urlsafe_b64encode(msgspec.json.encode((question, *after))).decode()


def decode_request_cursor(text: str, question: str) -> tuple[int, str] | None:
    """Where a page of single requests goes on; None at the beginning. Raises Refusal: 400."""
    after = _cursor(text, None, question)
    return None if after is None else (int(after[0]), str(after[1]))


def _question(
    parameters: MultiMapping[str],
    account_id: str | None,
    by: Sequence[Dimension] | None,
    order: Sequence[Order],
) -> str:
    """A digest of all that pages have in common. An age such as 24h stays one, though its instant moves."""
    asked = (
        account_id,
        by,
        order,
        [sorted(_values(parameters, name)) for name in _FILTERS],
        _single(parameters, "since"),
        _single(parameters, "until"),
    )
    return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:_QUESTION_CHARS]


def _grouping(text: str) -> tuple[Dimension, ...] | None:
    if text == REQUESTS:
        return None
    if text == "none":
        return ()
    known: dict[str, Dimension] = {dimension: dimension for dimension in DIMENSIONS}
    names = text.split(",")
    for name in names:
        if name not in known:
            raise bad_input(
                "group_by", f"{name[:50]!r} is none of {', '.join(DIMENSIONS)}, {REQUESTS} and none"
            )
    if len(set(names)) != len(names):
        raise bad_input("group_by", "names a dimension twice")
    if len([name for name in names if name in WIDTHS_US]) > 1:
        raise bad_input("group_by", "takes one of quarter, hour and day")
    return tuple(known[name] for name in names)


def _order(text: str | None, by: Sequence[Dimension] | None) -> tuple[Order, ...]:
    """By time where time is asked for, else the dearest first."""
    if text is not None and text not in _ORDERS:
        raise bad_input("order", f"{text[:50]!r} is none of {', '.join(_ORDERS)}")
    if by is None:
        if text is not None:
            raise bad_input("order", "single requests come newest first only")
        return ()
    if text is None:
        text = "key" if any(dimension in WIDTHS_US for dimension in by) else "amount"
    return (Order("amount_nanos", is_descending=True),) if text == "amount" else ()


def _single(parameters: MultiMapping[str], name: str) -> str | None:
    values = parameters.getall(name, [])
    if len(values) > 1:
        raise bad_input(name, "is there more than once")
    return values[0] if values else None


def _values(parameters: MultiMapping[str], name: str) -> tuple[str, ...]:
    values = tuple(parameters.getall(name, []))
    if len(values) > _MAX_VALUES:
        raise bad_input(name, f"is there more than {_MAX_VALUES} times")
    if any("\x00" in value for value in values):
        raise bad_input(name, "holds a character that no value can have")
    return values


def _instant(parameters: MultiMapping[str], name: str, now_us: int) -> int | None:
    text = _single(parameters, name)
    if text is None:
        return None
    try:
        instant_us = parse_instant(text, now_us)
    except (ValueError, OverflowError):
        raise bad_input(
            name, "is neither a date (2026-11-30), a time (…T12:00:00Z) nor an age (24h)"
        ) from None
    if not 0 <= instant_us < 253_402_300_800_000_000:
        raise bad_input(name, "is not between the years 1970 and 9999")
    return instant_us


def _limit(parameters: MultiMapping[str], max_rows: int) -> int:
    text = _single(parameters, "limit")
    if text is None:
        return min(_DEFAULT_LIMIT, max_rows)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= max_rows):
        raise bad_input("limit", f"is not a number from 1 to {max_rows}")
    return int(text)


def _cursor(text: str | None, by: Sequence[Dimension] | None, question: str) -> Keyset | None:
    if not text:
        return None
    try:
        if len(text) > _MAX_CURSOR_CHARS:
            raise ValueError
        asked, *after = msgspec.json.decode(base64.urlsafe_b64decode(text), type=tuple[str | int, ...])
    except (ValueError, msgspec.DecodeError):
        raise _foreign_cursor() from None
    is_request = len(after) == 2 and isinstance(after[0], int) and isinstance(after[1], str)
    if asked != question or (by is None and not is_request):
        raise _foreign_cursor()
    return tuple(after)


def _foreign_cursor() -> Refusal:
    return bad_input("cursor", "is not one that this question was answered with")
