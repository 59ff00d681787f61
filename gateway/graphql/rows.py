"""Answers in the names of the schema, and its instants."""

from __future__ import annotations

from typing import Any

from graphql import GraphQLError

from billing.analytics import UsageGroup, shown
from billing.latency import LatencySummary
from billing.periods import day_start_us, instant_text, parse_date, parse_instant
from billing.usage import Status
from billing.usage_log import RequestRow
from gateway.errors import Reason
from gateway.graphql.filters import DIMENSION_OF

_ERROR_CODES: dict[Status, int] = {
    "ok": 0,
    "client_disconnected": Reason.ABORTED.code,
    "timeout": Reason.TIMEOUT.code,
    "replica_lost": Reason.UNAVAILABLE.code,
    "error": Reason.INTERNAL.code,
}
_COST_METRICS = {"costMetricName1": "input_tokens", "costMetricName2": "output_tokens"}
_MAX_INSTANT_US = 253_402_300_800_000_000


def group_row(group: UsageGroup, latency: LatencySummary | None) -> dict[str, Any]:
    """An ``AiInferenceGroup``."""
    dimensions = {
        name: shown(dimension, group.dimensions[dimension])
        for name, dimension in DIMENSION_OF.items()
        if dimension in group.dimensions
    }
    return {
        "count": group.num_requests,
        "sum": {
            "totalNeurons": group.neurons_e4 / 10_000,
            "totalInputTokens": group.prompt_tokens,
            "totalCachedInputTokens": group.cached_prompt_tokens,
            "totalOutputTokens": group.completion_tokens,
            "totalInferenceTimeMs": group.duration_us / 1_000,
            "totalAudioSeconds": 0.0,
            "totalCostMetricValue1": float(group.prompt_tokens),
            "totalCostMetricValue2": float(group.completion_tokens),
            "totalAmountNanos": group.amount_nanos,
            "totalUndiscountedNanos": group.undiscounted_nanos,
        },
        "dimensions": dimensions | _COST_METRICS,
        "quantiles": None if latency is None else _quantiles(latency),
    }


def request_row(row: RequestRow) -> dict[str, Any]:
    """An ``AiInference``."""
    return {
        "requestId": row.request_id,
        "datetime": instant_text(row.started_at_us)[:19] + "Z",
        "modelId": row.model,
        "requestSource": row.surface,
        "neurons": row.neurons_e4 / 10_000,
        "inputTokens": row.prompt_tokens,
        "cachedInputTokens": row.cached_prompt_tokens,
        "outputTokens": row.completion_tokens,
        "inferenceTimeMs": row.duration_us / 1_000,
        "ttftMs": row.ttft_us / 1_000 if row.ttft_us else None,
        "errorCode": {str(status): code for status, code in _ERROR_CODES.items()}[row.status],
        "sampleInterval": 1,
        "sessionId": row.session,
        "tokenId": row.token_id,
        "status": row.status,
        "amountNanos": row.amount_nanos,
    }


def parse_day(value: Any) -> int:
    """A ``Date`` as the microseconds of its start."""
    try:
        return day_start_us(parse_date(value))
    except (TypeError, ValueError):
        raise GraphQLError(f"{str(value)[:50]!r} is not a date of the form 2026-11-30") from None


def parse_time(value: Any) -> int:
    """A ``Time`` as microseconds."""
    try:
        instant_us = parse_instant(value, -1)  # ages are refused below: they lie before the epoch
    except (TypeError, ValueError, OverflowError):
        instant_us = -1
    if not 0 <= instant_us < _MAX_INSTANT_US:
        raise GraphQLError(f"{str(value)[:50]!r} is not a time of the form 2026-11-30T12:00:00Z")
    return instant_us


def _quantiles(latency: LatencySummary) -> dict[str, float | None]:
    return {
        "ttftMsP50": latency.ttft_ms_p50,
        "ttftMsP90": latency.ttft_ms_p90,
        "ttftMsP99": latency.ttft_ms_p99,
        "tokensPerSecondP50": latency.tokens_per_second_p50,
        "tokensPerSecondP90": latency.tokens_per_second_p90,
        "tokensPerSecondP99": latency.tokens_per_second_p99,
    }
