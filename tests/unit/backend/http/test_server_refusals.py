"""Refusals: the true status before any byte of an answer, a stable code, the one wrong field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.scripted_replica import Replica, StartReplica


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"top_k": -1}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"frequency_penalty": 3}, "frequency_penalty", "invalid_value"),
        ({"presence_penalty": -3}, "presence_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": ["x" * 5000]}, "stop", "invalid_value"),
        ({"stop": [6]}, "stop[0]", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
        ({"logit_bias": {"267": 1}}, "logit_bias.267", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "boss"}]}, "messages[0].role", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"request_id": ""}, "request_id", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"not": {}}}},
            "response_format.json_schema.not",
            "unsupported_schema",
        ),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "invalid_value",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "invalid_value",
        ),
    ],
)
async def test_a_wrong_field_is_named(
    replica: Replica, stream: bool, fields: dict[str, Any], param: str, code: str
) -> None:
    replica.say("never")
    answer = await replica.complete(stream=stream, **fields)
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert replica.engine.requests == []
    assert await replica.usages() == []


async def test_a_missing_field_is_named(replica: Replica) -> None:
    body = replica.request()
    del body["model"]
    answer = await replica.call("POST", "/v1/chat/completions", json=body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"model": "\xff"}', b"[]"])
async def test_a_body_that_is_no_request_is_refused(replica: Replica, body: bytes) -> None:
    answer = await replica.call("POST", "/v1/chat/completions", data=body)
    assert answer.status == 400
    assert answer.json["error"]["message"]


async def test_unknown_fields_are_ignored(replica: Replica) -> None:
    replica.say("x")
    assert (await replica.complete(from_the_future={"a": 1})).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_does_not_fit_is_refused_with_the_sentence_that_agents_know(
    replica: Replica, stream: bool
) -> None:
    content = "x" * 600
    answer = await replica.complete(
        stream=stream, messages=[{"role": "user", "content": content}], max_tokens=None
    )
    num_prompt = 600 + len(replica.tokenizer.encode_text("user\n\nassistant\n")) + 3
    assert answer.status == 400
    assert answer.headers["Content-Type"].startswith("application/json")
    error = answer.json["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "Requested token count exceeds the model's maximum context length of 512 tokens. "
        f"You requested a total of {num_prompt + 1} tokens: {num_prompt} tokens from the input messages and "
        "1 tokens for the completion. Please reduce the number of tokens in the input messages or the "
        "completion to fit within the limit."
    )
    assert replica.engine.requests == []
    assert await replica.usages() == []


async def test_a_completion_that_does_not_fit_is_refused(replica: Replica) -> None:
    answer = await replica.complete(max_tokens=512)
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert "maximum context length of 512 tokens" in answer.json["error"]["message"]
    assert "512 tokens for the completion" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [("queue_full", 429), ("queue_timeout", 429), ("busy", 429), ("context_length_exceeded", 400)],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_engine_refuses_has_its_status_and_leaves_no_usage(
    replica: Replica, refusal: str, status: int, stream: bool
) -> None:
    replica.say("x", refusal=refusal, delay_s=0.01)
    answer = await replica.complete(stream=stream)
    assert answer.status == status
    assert answer.json["error"]["code"] == refusal
    assert ("Retry-After" in answer.headers) == (status == 429)
    assert await replica.usages() == []


async def test_a_full_engine_is_a_429(replica: Replica) -> None:
    replica.say("x")
    replica.engine.refuses_submit = True
    answer = await replica.complete()
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    replica.engine.refuses_submit = False
    assert (await replica.complete()).status == 200


async def test_requests_beyond_what_may_run_and_wait_are_refused_at_the_door(replica: Replica) -> None:
    replica.say("abcdef", delay_s=0.05)
    answers = await asyncio.gather(*(replica.complete() for _ in range(11)))
    statuses = sorted(answer.status for answer in answers)
    assert statuses == [200] * 8 + [429] * 3


async def test_the_same_id_twice_at_once_is_refused(replica: Replica) -> None:
    replica.say("abcdef", delay_s=0.02)
    answers = await asyncio.gather(*(replica.complete(request_id="same") for _ in range(2)))
    assert sorted(answer.status for answer in answers) == [200, 409]
    assert len(await replica.usages()) == 1
    assert (await replica.complete(request_id="same")).status == 200


async def test_an_engine_that_gives_up_on_a_sequence_is_an_error_with_its_message(replica: Replica) -> None:
    replica.say("x", "error", message="a block went missing")
    answer = await replica.complete()
    assert answer.status == 500
    assert answer.json["error"] == {
        "message": "a block went missing",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert [u["finish_reason"] for u in await replica.usages()] == ["error"]


async def test_a_choice_refused_late_ends_the_stream_with_an_error(replica: Replica) -> None:
    replica.say("abcdef", delay_s=0.02)
    replica.say("x", refusal="queue_timeout")
    answer = await replica.complete(n=2, stream=True)
    assert answer.status == 200
    assert answer.chunks[-1]["error"]["code"] == "queue_timeout"
    assert b"[DONE]" not in answer.body
    assert [u["finish_reason"] for u in await replica.usages()] == ["error"]


async def test_a_body_over_the_limit_is_refused(start_replica: StartReplica) -> None:
    replica = await start_replica(max_body_bytes=1000)
    answer = await replica.complete(messages=[{"role": "user", "content": "x" * 2000}])
    assert answer.status == 413
    assert answer.json["error"]["code"] == "request_too_large"


async def test_unknown_paths_and_methods_are_json_errors(replica: Replica) -> None:
    missing = await replica.call("GET", "/nothing")
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    method = await replica.call("GET", "/v1/chat/completions")
    assert (method.status, method.json["error"]["code"]) == (405, "not_found")


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "9" * 30, "²"])
async def test_a_place_in_the_usages_must_be_a_number(replica: Replica, after: str) -> None:
    answer = await replica.call("GET", "/usages", params={"after": after})
    assert (answer.status, answer.json["error"]["param"]) == (400, "after")


async def test_an_abort_without_an_id_is_refused(replica: Replica) -> None:
    answer = await replica.call("POST", "/abort", json={})
    assert (answer.status, answer.json["error"]["param"]) == (400, "request_id")


class TestPoolToken:
    async def test_every_route_but_two_wants_it(self, start_replica: StartReplica) -> None:
        replica = await start_replica(token="sesame")
        replica.say("x")
        assert (await replica.complete()).status == 200
        for path in ("/stats", "/usages"):
            assert (await replica.call("GET", path)).status == 200
            for wrong in ("Bearer sesam", "Bearer sesamee", "sesame", "", "Bearer é"):
                answer = await replica.call("GET", path, headers={"Authorization": wrong})
                assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/health", "/metrics"):
            assert (await replica.call("GET", path, headers={"Authorization": ""})).status == 200

    async def test_without_one_nothing_is_asked_for(self, replica: Replica) -> None:
        assert (await replica.call("GET", "/stats")).status == 200


class TestState:
    async def test_a_starting_replica_says_so_and_takes_nothing(self, start_replica: StartReplica) -> None:
        replica = await start_replica(loads=False)
        health = await replica.call("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "starting")
        answer = await replica.complete()
        assert (answer.status, answer.json["error"]["code"]) == (503, "starting")
        assert (await replica.call("GET", "/stats")).json["num_blocks"] == 0
        assert (await replica.call("GET", "/metrics")).status == 200
        await replica.server.load()
        health = await replica.call("GET", "/health")
        wanted = {
            "status": "ready",
            "replica_id": "replica-0",
            "model": "@cf/test/model",
            "stage": "",
            "fraction": 1.0,
            "role": "both",
        }
        assert (health.status, health.json) == (200, health.json | wanted)

    async def test_draining_is_reversible_and_lets_requests_finish(self, replica: Replica) -> None:
        replica.say("abcdef", delay_s=0.03)
        running = asyncio.create_task(replica.complete(stream=True))
        await asyncio.sleep(0.05)
        assert (await replica.call("POST", "/drain")).json["status"] == "draining"
        health = await replica.call("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "draining")
        refused = await replica.complete()
        assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
        assert (await running).text() == "abcdef"
        assert (await replica.call("POST", "/resume")).json["status"] == "ready"
        assert (await replica.complete()).status == 200
