"""GraphQL's filters and orders in the terms of ``billing.analytics``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphql import GraphQLError

from billing.analytics import Dimension, Order, UsageFilter
from billing.periods import MICROS_PER_DAY, MICROS_PER_SECOND, Period
from billing.rollups import MICROS_PER_HOUR, MICROS_PER_QUARTER

DIMENSION_OF: Mapping[str, Dimension] = {
    "date": "day",
    "datetimeHour": "hour",
    "datetimeFifteenMinutes": "quarter",
    "modelId": "model",
    "requestSource": "surface",
    "sessionId": "session",
    "tokenId": "token",
    "status": "status",
}
_COLUMN_OF: Mapping[str, str] = {
    "count": "num_requests",
    "sum_totalNeurons": "neurons_e4",
    "sum_totalInputTokens": "prompt_tokens",
    "sum_totalOutputTokens": "completion_tokens",
}
_WIDTH_OF: Mapping[str, int] = {
    "date": MICROS_PER_DAY,
    "datetime": MICROS_PER_SECOND,
    "datetimeHour": MICROS_PER_HOUR,
    "datetimeFifteenMinutes": MICROS_PER_QUARTER,
}
"""What "up to and including" a value of each means."""
_MAX_NUMBER = 1e15
_MAX_VALUES = 200


def usage_filter(account_id: str, given: Mapping[str, Any]) -> UsageFilter:
    """The filter argument's meaning. Raises GraphQLError for numbers or lists that are out of bounds."""
    return UsageFilter(
        account_id=account_id,
        period=_period(given),
        models=_texts(given, "modelId"),
        sessions=_texts(given, "sessionId"),
        surfaces=_texts(given, "requestSource"),
        token_ids=_texts(given, "tokenId"),
        statuses=_texts(given, "status"),
        min_neurons_e4=math.ceil(_number(given, "neurons_geq") * 10_000),
        min_prompt_tokens=math.ceil(_number(given, "costMetricValue1_geq")),
    )


def groups_order(given: Sequence[str] | None, by: Sequence[Dimension]) -> list[Order]:
    """The order argument's meaning. Raises GraphQLError: a dimension that is not selected."""
    orders = []
    for text in given or ():
        name, _, direction = text.rpartition("_")
        column: str | None = _COLUMN_OF.get(name)
        if column is None:
            column = DIMENSION_OF[name]
            if column not in by:
                raise GraphQLError(f"orderBy {text} needs the dimension {name} to be selected")
        orders.append(Order(column, is_descending=direction == "DESC"))
    return orders


def _period(given: Mapping[str, Any]) -> Period:
    starts, ends = [], []
    for key, value in given.items():
        name, _, relation = key.partition("_")
        width_us = _WIDTH_OF.get(name)
        if width_us is None or value is None:
            continue
        if relation in ("", "geq"):
            starts.append(value)
        if relation == "gt":
            starts.append(value + width_us)
        if relation in ("", "leq"):
            ends.append(value + width_us)
        if relation == "lt":
            ends.append(value)
    return Period(max(starts, default=None), min(ends, default=None))


def _texts(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """One value, or those of a list; both together are what they have in common."""
    one, several = given.get(name), given.get(f"{name}_in")
    if several is not None and len(several) > _MAX_VALUES:
        raise GraphQLError(f"{name}_in has more than {_MAX_VALUES} values")
    if any("\x00" in text for text in [one or "", *(several or ())]):
        raise GraphQLError(f"{name} holds a character that no value can have")
    if several is None:
        return () if one is None else (one,)
    if one is not None:
        several = [text for text in several if text == one]
    return tuple(several) or ("\x01",)  # nothing has such a name: an empty list is met by none


def _number(given: Mapping[str, Any], name: str) -> float:
    value = given.get(name)
    if value is None:
        return 0.0
    if not abs(value) <= _MAX_NUMBER:
        raise GraphQLError(f"{name} is out of bounds")
    return float(value)
