"""GraphQL analytics, with the queries that live clients send."""

from __future__ import annotations

from typing import Any

import pytest

from billing.rates import RateBook
from billing.usage import UsageRecord
from gateway.config import AnalyticsConfig
from tests.contract.test_usage_api import BLIND_TOKEN, OPERATOR_TOKEN, Start, books
from tests.support.gateway_harness import (
    ACCOUNT,
    BILLING,
    MODEL,
    OTHER_ACCOUNT,
    OTHER_TOKEN,
    TOKEN,
    Harness,
    gateway_config,
)

pytestmark = pytest.mark.each_store

__all__ = ["books"]  # the fixture

DAILY = """
query Daily($accountTag: String!, $start: Date!, $end: Date!) {
  viewer {
    accounts(filter: { accountTag: $accountTag }) {
      aiInferenceAdaptiveGroups(
        limit: 10000, filter: { date_geq: $start, date_leq: $end }, orderBy: [date_ASC]
      ) {
        count
        sum { totalNeurons totalInputTokens totalCachedInputTokens totalOutputTokens totalInferenceTimeMs
              totalAudioSeconds totalCostMetricValue1 totalCostMetricValue2 }
        dimensions { date modelId costMetricName1 costMetricName2 }
      }
    }
  }
}
"""
RECENT = """
query Recent($accountTag: String!, $since: Time!) {
  viewer { accounts(filter: { accountTag: $accountTag }) {
    aiInferenceAdaptive(limit: 5, filter: { datetime_geq: $since }, orderBy: [datetime_ASC]) {
      datetime modelId requestSource neurons inputTokens outputTokens cachedInputTokens inferenceTimeMs
      errorCode sampleInterval
    }
  } }
}
"""
RANGE = {"accountTag": ACCOUNT, "start": "2026-11-01", "end": "2026-11-30"}


async def ask(gateway: Harness, query: str, variables: Any = None, *, token: str | None = TOKEN) -> Any:
    reply = await gateway.post(
        gateway.root("/client/v4/graphql"), {"query": query, "variables": variables}, token=token
    )
    assert reply.status == 200, reply.body
    return reply.json


async def groups(gateway: Harness, arguments: str, fields: str) -> list[Any]:
    answer = await ask(
        gateway, f"{{ viewer {{ accounts {{ aiInferenceAdaptiveGroups({arguments}) {{ {fields} }} }} }} }}"
    )
    assert answer["errors"] is None, answer
    found: list[Any] = answer["data"]["viewer"]["accounts"][0]["aiInferenceAdaptiveGroups"]
    return found


async def problem(gateway: Harness, query: str, variables: Any = None, *, token: str = TOKEN) -> str:
    answer = await ask(gateway, query, variables, token=token)
    assert answer["data"] is None
    return str(answer["errors"][0]["message"])


async def test_days_by_model(books: list[UsageRecord], gateway: Harness) -> None:
    answer = await ask(gateway, DAILY, RANGE)
    [group] = answer["data"]["viewer"]["accounts"][0]["aiInferenceAdaptiveGroups"]
    book = RateBook.from_config(BILLING)
    assert answer["errors"] is None
    assert group["count"] == 60
    assert group["dimensions"] == {
        "date": "2026-11-30",
        "modelId": MODEL,
        "costMetricName1": "input_tokens",
        "costMetricName2": "output_tokens",
    }
    assert group["sum"] == {
        "totalNeurons": sum(book.price(one).neurons_e4 for one in books) / 10_000,
        "totalInputTokens": 60_000,
        "totalCachedInputTokens": 48_000,
        "totalOutputTokens": 3_000,
        "totalInferenceTimeMs": 120_000.0,
        "totalAudioSeconds": 0.0,
        "totalCostMetricValue1": 60_000.0,
        "totalCostMetricValue2": 3_000.0,
    }


async def test_single_requests(books: list[UsageRecord], gateway: Harness) -> None:
    answer = await ask(gateway, RECENT, {"accountTag": ACCOUNT, "since": "2026-11-30T13:20:00Z"})
    rows = answer["data"]["viewer"]["accounts"][0]["aiInferenceAdaptive"]
    assert [row["datetime"] for row in rows] == [
        f"2026-11-30T{time}:00Z" for time in ("13:20", "13:30", "13:40", "13:50", "14:00")
    ]
    assert rows[1]["errorCode"] == 7009
    assert rows[0] == {
        "datetime": "2026-11-30T13:20:00Z",
        "modelId": MODEL,
        "requestSource": "run",
        "neurons": 31.8182,
        "inputTokens": 1_000,
        "outputTokens": 50,
        "cachedInputTokens": 800,
        "inferenceTimeMs": 2_000.0,
        "errorCode": 0,
        "sampleInterval": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "fields", "counts"),
    [
        ("limit: 9", "count", [60]),
        ('limit: 9, filter: {date: "2026-11-30"}', "count", [60]),
        ('limit: 9, filter: {date_gt: "2026-11-30"}', "count", []),
        ('limit: 9, filter: {date_lt: "2026-11-30"}', "count dimensions { date }", []),
        (
            'limit: 9, filter: {datetimeHour_geq: "2026-11-30T21:00:00Z"}',
            "count dimensions { datetimeHour }",
            [6],
        ),
        ('limit: 9, filter: {datetime_lt: "2026-11-30T12:15:00Z"}', "count", [2]),
        ('limit: 9, filter: {datetime_leq: "2026-11-30T12:14:59Z"}', "count", [2]),
        ('limit: 9, filter: {modelId_in: ["@cf/another"]}', "count dimensions { modelId }", []),
        ("limit: 9, filter: {modelId_in: []}", "count", []),
        ("limit: 9, filter: {neurons_geq: 1}", "count", [54]),
        ("limit: 9, filter: {neurons_geq: 32}", "count", []),
        ("limit: 9, filter: {costMetricValue1_geq: 1000}", "count", [60]),
        ("limit: 9, filter: {costMetricValue1_geq: 1001}", "count", []),
        (
            "limit: 3, orderBy: [datetimeFifteenMinutes_ASC]",
            "count dimensions { datetimeFifteenMinutes }",
            [2, 1, 2],
        ),
        ("limit: 9, orderBy: [sum_totalNeurons_DESC]", "count dimensions { sessionId }", [20, 20, 20]),
        (
            "limit: 9, orderBy: [count_DESC]",
            "count ... @include(if: true) { dimensions { status } }",
            [54, 6],
        ),
    ],
)
async def test_filters_and_orders(
    books: list[UsageRecord], gateway: Harness, arguments: str, fields: str, counts: list[int]
) -> None:
    assert [group["count"] for group in await groups(gateway, arguments, fields)] == counts


async def test_quantiles_where_they_are_kept(books: list[UsageRecord], gateway: Harness) -> None:
    fields = "dimensions { datetimeHour } quantiles { ttftMsP50 tokensPerSecondP90 }"
    rows = await groups(gateway, "limit: 99, orderBy: [datetimeHour_ASC]", fields)
    assert 98 < rows[0]["quantiles"]["ttftMsP50"] < 107
    assert 24 < rows[0]["quantiles"]["tokensPerSecondP90"] < 28
    [none, *_] = await groups(gateway, "limit: 9", "dimensions { status } quantiles { ttftMsP50 }")
    assert none["quantiles"] is None


async def test_fragments_count_as_selected(books: list[UsageRecord], gateway: Harness) -> None:
    query = """
    query { viewer { accounts { aiInferenceAdaptiveGroups(limit: 9) { ...all } } } }
    fragment all on AiInferenceGroup { n: count dimensions { ...day } }
    fragment day on AiInferenceDimensions { when: date }
    """
    answer = await ask(gateway, query)
    assert answer["data"]["viewer"]["accounts"][0]["aiInferenceAdaptiveGroups"] == [
        {"n": 60, "dimensions": {"when": "2026-11-30"}}
    ]


async def test_the_account_comes_from_the_token(books: list[UsageRecord], gateway: Harness) -> None:
    assert "not authorized for that account" in await problem(gateway, DAILY, RANGE, token=OTHER_TOKEN)
    other = RANGE | {"accountTag": OTHER_ACCOUNT}
    assert "not authorized for that account" in await problem(gateway, DAILY, other)
    answer = await ask(gateway, DAILY, RANGE, token=OPERATOR_TOKEN)
    assert answer["data"]["viewer"]["accounts"][0]["aiInferenceAdaptiveGroups"][0]["count"] == 60
    url = gateway.root("/client/v4/graphql")
    for token, status in ((None, 401), ("x" * 40, 401), (BLIND_TOKEN, 403)):
        reply = await gateway.post(url, {"query": DAILY}, token=token)
        assert reply.status == status
        assert reply.json["data"] is None
        assert reply.json["errors"][0]["message"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("{ viewer { accounts { nothing } } }", "Cannot query field 'nothing'"),
        ("{ viewer {", "Syntax Error"),
        ("{ viewer { accounts { aiInferenceAdaptiveGroups(limit: 10001) { count } } } }", "limit must be"),
        ("{ viewer { accounts { aiInferenceAdaptiveGroups(limit: 0) { count } } } }", "limit must be"),
        (
            "{ viewer { accounts { aiInferenceAdaptiveGroups(limit: 1, orderBy: [date_ASC]) { count } } } }",
            "needs the dimension date",
        ),
        (
            "{ viewer { accounts { aiInferenceAdaptiveGroups(limit: 1) "
            "{ dimensions { sessionId datetimeFifteenMinutes } } } } }",
            "by the hour",
        ),
        (
            '{ viewer { accounts { aiInferenceAdaptive(limit: 1, filter: {datetime_geq: "24h"}) '
            "{ neurons } } } }",
            "is not a time",
        ),
        (
            '{ viewer { accounts { aiInferenceAdaptive(limit: 1, filter: {date: "2026-13-01"}) '
            "{ neurons } } } }",
            "is not a date",
        ),
        ("query A { viewer { __typename } } query B { viewer { __typename } }", "operation name"),
        ("{ " + "__typename " * 501 + "}", "more than 500 fields"),
        ("{ " + "a: __typename " * 3_000 + "}", "contains more than 2000 tokens"),
        ("{ __schema { types { fields { type " + "{ ofType " * 14 + "{ name }" + "}" * 18, "15 levels deep"),
    ],
)
async def test_what_cannot_be_answered_is_explained(gateway: Harness, query: str, message: str) -> None:
    assert message in await problem(gateway, query)


async def test_fragments_that_multiply_are_refused(gateway: Harness) -> None:
    bomb = "{ viewer { ...f0 } } " + " ".join(
        f"fragment f{level} on Viewer {{ ...f{level + 1} ...f{level + 1} }}" for level in range(20)
    )
    assert "more than 500 fields" in await problem(gateway, bomb + " fragment f20 on Viewer { __typename }")


async def test_bodies_are_bounded_and_must_be_graphql(gateway: Harness, start_gateway: Start) -> None:
    url = gateway.root("/client/v4/graphql")
    assert (await gateway.post(url, b"{")).status == 400
    assert (await gateway.post(url, {"query": 3})).status == 400
    await gateway.stop()
    small = await start_gateway(gateway_config(analytics=AnalyticsConfig(max_query_bytes=100)))
    url = small.root("/client/v4/graphql")
    assert (await small.post(url, {"query": DAILY})).status == 413
    assert (await ask(small, "{ viewer { __typename } }"))["data"] == {"viewer": {"__typename": "Viewer"}}


async def test_the_schema_can_be_asked_for(gateway: Harness) -> None:
    from graphql import get_introspection_query

    answer = await ask(gateway, get_introspection_query())
    names = {kind["name"] for kind in answer["data"]["__schema"]["types"]}
    assert {"Account", "AiInferenceGroup", "AiInferenceSum"} <= names
