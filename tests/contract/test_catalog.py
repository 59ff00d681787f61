"""The catalog and the questions about tokens, as SDKs, wrangler and Workers ask them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import jsonschema
import msgspec
import pytest

from gateway.config import EMBEDDINGS_TASK, ServedModel
from tests.support.gateway_harness import ACCOUNT, ALIAS, BILLING, MODEL, OTHER_TOKEN, TOKEN, Harness, Reply

DAY = timedelta(days=1)
TODAY = datetime.now(UTC).date()
MODELS = [
    ServedModel(
        id=MODEL,
        aliases=[ALIAS],
        max_model_len=4096,
        description="The one that thinks",
        created_at="2026-02-02",
        tags=["agents"],
        properties={"function_calling": "true", "reasoning": "true"},
        sees_images=True,
    ),
    ServedModel(id="@hf/baai/bge-small", task=EMBEDDINGS_TASK, properties={"beta": "true"}),
    ServedModel(id="plain", properties={"planned_deprecation_date": str(TODAY + DAY)}),
    ServedModel(id="@cf/old/recent", properties={"planned_deprecation_date": str(TODAY - DAY)}),
    ServedModel(id="@cf/old/gone", properties={"planned_deprecation_date": str(TODAY - 200 * DAY)}),
]
ALL = [MODEL, ALIAS, "@hf/baai/bge-small", "plain"]


@pytest.fixture
async def catalog(start_gateway: Callable[..., Awaitable[Harness]]) -> Harness:
    card = BILLING.rate_cards[0]
    cards = [msgspec.structs.replace(card, model=model.id) for model in MODELS]
    return await start_gateway(models=MODELS, billing=msgspec.structs.replace(BILLING, rate_cards=cards))


def names(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["success"] is True
    return [row["name"] for row in reply.json["result"]]


async def test_a_row_says_what_the_model_is_and_costs(catalog: Harness) -> None:
    reply = await catalog.get("/models/search")
    assert names(reply) == ALL
    row = reply.json["result"][0]
    assert len(row["id"]) == 36
    assert (row["source"], row["created_at"], row["tags"]) == (1, "2026-02-02 00:00:00.000", ["agents"])
    assert row["task"]["name"] == "Text Generation"
    properties = {each["property_id"]: each["value"] for each in row["properties"]}
    assert properties == {
        "context_window": "4096",
        "price": [
            {"unit": "per M input tokens", "price": 0.6, "currency": "USD"},
            {"unit": "per M output tokens", "price": 3.0, "currency": "USD"},
            {"unit": "per M cached input tokens", "price": 0.1, "currency": "USD"},
        ],
        "vision": "true",
        "async_queue": "true",
        "function_calling": "true",
        "reasoning": "true",
    }
    alias = {each["property_id"]: each["value"] for each in reply.json["result"][1]["properties"]}
    assert alias["alias_of"] == MODEL
    assert alias["price"] == properties["price"]
    info = {"count": 4, "page": 1, "per_page": 100, "total_count": 4, "total_pages": 1}
    assert reply.json["result_info"] == info


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("task=Text%20Generation", [MODEL, ALIAS, "plain"]),
        ("task=text+embeddings", ["@hf/baai/bge-small"]),
        ("task=Text", []),
        ("author=moonshotai", [MODEL, ALIAS]),
        ("source=2", ["@hf/baai/bge-small"]),
        ("search=K2.6", [ALIAS]),
        ("search=that+thinks", [MODEL, ALIAS]),
        ("hide_experimental=true", [MODEL, ALIAS, "plain"]),
        ("hide_experimental=false", ALL),
        ("include_deprecated=true", [*ALL, "@cf/old/recent"]),
        ("author=&task=&search=&source=&page=", ALL),
        ("anything=else", ALL),
    ],
)
async def test_filters(catalog: Harness, query: str, expected: list[str]) -> None:
    assert names(await catalog.get(f"/models/search?{query}")) == expected


async def test_pages_end_with_an_empty_one(catalog: Harness) -> None:
    pages = [await catalog.get(f"/models/search?per_page=3&page={page}") for page in (1, 2, 3, 999999999)]
    assert [names(page) for page in pages] == [ALL[:3], ALL[3:], [], []]
    assert pages[2].json["result_info"] == {
        "count": 0, "page": 3, "per_page": 3, "total_count": 4, "total_pages": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("page=0", "page"),
        ("page=x", "page"),
        ("per_page=-1", "per_page"),
        ("per_page=1e9", "per_page"),
        ("page=99999999999999999999", "page"),
        ("source=cf", "source"),
        ("hide_experimental=maybe", "hide_experimental"),
        ("format=xml", "format"),
    ],
)
async def test_a_bad_parameter_is_named(catalog: Harness, query: str, field: str) -> None:
    reply = await catalog.get(f"/models/search?{query}")
    assert reply.status == 400
    assert f"'{field}'" in reply.json["errors"][0]["message"]


async def test_the_marketplace_form(catalog: Harness) -> None:
    reply = await catalog.get("/models/search?format=openrouter")
    first, _, embedder, plain = reply.json["data"]
    assert first["id"] == f"workers-ai/{MODEL}"
    assert first["context_length"] == 4096
    assert first["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    assert first["pricing"] == {
        "prompt": "0.0000006", "completion": "0.000003", "input_cache_read": "0.0000001"
    }  # fmt: skip
    assert "tools" in first["supported_parameters"]
    assert "tools" not in plain["supported_parameters"]
    assert embedder["architecture"]["output_modalities"] == ["embeddings"]


async def test_schemas_are_those_of_the_real_bodies_and_answers(catalog: Harness) -> None:
    reply = await catalog.get(f"/models/schema?model={MODEL}")
    schemas = reply.json["result"]
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.5}
    jsonschema.validate(body, schemas["input"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {"temperature": 3}, schemas["input"])
    answer = (await catalog.chat(path=f"/run/{MODEL}")).json["result"]
    jsonschema.validate(answer, schemas["output"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(answer | {"choices": [{}]}, schemas["output"])
    embedder = (await catalog.get("/models/schema?model=@hf/baai/bge-small")).json["result"]
    jsonschema.validate({"text": ["a"]}, embedder["input"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"text": 1}, embedder["input"])
    missing = await catalog.get("/models/schema")
    assert (missing.status, "'model'" in missing.json["errors"][0]["message"]) == (400, True)
    unknown = await catalog.get("/models/schema?model=nobody")
    assert (unknown.status, unknown.json["errors"][0]["code"]) == (400, 5007)


async def test_tasks_authors_and_finetunes(catalog: Harness) -> None:
    tasks = await catalog.get("/tasks/search")
    assert names(tasks) == ["Text Generation", "Text Embeddings"]
    row = (await catalog.get("/models/search")).json["result"][0]
    assert row["task"] == tasks.json["result"][0]
    assert names(await catalog.get("/authors/search")) == ["baai", "moonshotai", "old"]
    for path in ("/finetunes", "/finetunes/public"):
        assert names(await catalog.get(path)) == []


async def test_a_worker_lists_models_through_its_binding(catalog: Harness) -> None:
    assert names(await catalog.get(catalog.root("/ai-api/models/search?search=kimi&per_page=1"))) == [MODEL]


@pytest.mark.parametrize(
    "path",
    [
        "/models/search", "/models/schema", "/tasks/search", "/authors/search", "/finetunes",
        "/client/v4/accounts", "/client/v4/memberships", "/client/v4/user",
    ],
)  # fmt: skip
@pytest.mark.parametrize("token", [None, "wrong"])
async def test_nothing_is_shown_to_strangers(gateway: Harness, path: str, token: str | None) -> None:
    url = gateway.root(path) if path.startswith("/client") else path
    reply = await gateway.get(url, token=token)
    assert (reply.status, reply.json["errors"][0]["code"]) == (401, 10000)
    assert reply.json["result"] is None


async def test_another_accounts_token_sees_nothing(gateway: Harness) -> None:
    assert (await gateway.get("/models/search", token=OTHER_TOKEN)).status == 401
    verify = gateway.root(f"/client/v4/accounts/{ACCOUNT}/tokens/verify")
    assert (await gateway.get(verify, token=OTHER_TOKEN)).status == 401


@pytest.mark.parametrize("path", ["/user/tokens/verify", f"/accounts/{ACCOUNT}/tokens/verify"])
async def test_a_token_is_verified_at_either_place(gateway: Harness, path: str) -> None:
    reply = await gateway.get(gateway.root(f"/client/v4{path}"))
    assert reply.status == 200
    assert reply.json["result"]["status"] == "active"
    assert reply.json["result"]["id"] not in (None, "", TOKEN)
    message = {"code": 10000, "message": "This API Token is valid and active"}
    assert reply.json["messages"] == [message]
    wrong = await gateway.get(gateway.root(f"/client/v4{path}"), token="wrong")
    assert (wrong.status, wrong.json["errors"]) == (401, [{"code": 1000, "message": "Invalid API Token"}])


async def test_a_token_sees_its_one_account_and_is_nobodys(gateway: Harness) -> None:
    account = {"id": ACCOUNT, "name": "test", "type": "standard"}
    accounts = await gateway.get(gateway.root("/client/v4/accounts"))
    assert accounts.json["result"] == [account]
    assert accounts.json["result_info"]["total_pages"] == 1
    past = await gateway.get(gateway.root("/client/v4/accounts?page=2"))
    assert past.json["result"] == []
    one = await gateway.get(gateway.root(f"/client/v4/accounts/{ACCOUNT}"))
    assert one.json["result"] == account
    memberships: list[dict[str, Any]] = (await gateway.get(gateway.root("/client/v4/memberships"))).json[
        "result"
    ]
    assert [(each["account"], each["status"]) for each in memberships] == [(account, "accepted")]
    user = await gateway.get(gateway.root("/client/v4/user"))
    assert (user.status, user.json["errors"][0]["code"]) == (403, 9109)


async def test_the_wrong_method_is_told_the_right_one(gateway: Harness) -> None:
    reply = await gateway.post("/models/search", {})
    assert (reply.status, reply.json["errors"][0]["code"]) == (405, 7001)
    assert "GET" in reply.headers["allow"]
    nowhere = await gateway.get("/models/nowhere")
    assert (nowhere.status, nowhere.json["errors"][0]["code"]) == (404, 7003)
