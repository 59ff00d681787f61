"""A Worker with the real ``env.AI`` in a real workerd: the runtime's own binding, unchanged."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support.client_installation import SLOW_WAIT_S, TINY, ClientInstallation
from tests.support.client_packages import SOURCES, ClientPackages
from tests.support.installation import ALIAS, MODEL
from tests.support.worker import Worker, workerd

SCRIPT = SOURCES / "workers" / "binding.js"
SYSTEM = "You are a helpful assistant that answers every question about cities in one short sentence. " * 12
INPUTS = {"messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 8, "temperature": 0}
LONG = {**INPUTS, "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def worker(
    packages: ClientPackages, installation: ClientInstallation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    with workerd(packages, SCRIPT, directory, installation.environment_of()) as worker:
        yield worker


def frames(text: str) -> list[Any]:
    """Decoded data frames of a stream, ``[DONE]`` as that string."""
    payloads = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame]
    return [each if each == "[DONE]" else json.loads(each) for each in payloads]


def chat(session: str) -> dict[str, Any]:
    """Options of a run that belongs to a session."""
    return {"extraHeaders": {"x-session-affinity": session}}


def test_run_gives_an_object_and_the_properties_of_the_binding(worker: Worker) -> None:
    answer = worker.do("run", model=ALIAS, inputs=INPUTS)
    result = answer["result"]
    assert result["object"] == "chat.completion"
    assert result["model"] == MODEL
    assert result["choices"][0]["message"]["content"]
    assert 1 <= result["usage"]["completion_tokens"] <= 8
    assert result["usage"]["neurons"] > 0
    assert UUID(answer["seen"]["lastRequestId"])
    assert answer["seen"]["lastRequestHttpStatusCode"] == 200
    assert answer["seen"]["aiGatewayLogId"] is None


def test_stream_gives_a_readable_stream_that_ends_with_one_usage(worker: Worker) -> None:
    result = worker.result("stream", model=ALIAS, inputs=INPUTS)
    assert result["isStream"] is True
    *chunks, usage, tail, done = frames(result["text"])
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    whole = worker.result("run", model=ALIAS, inputs=INPUTS)
    assert text == whole["choices"][0]["message"]["content"]
    assert (usage["choices"], tail["response"], done) == ([], "", "[DONE]")
    assert tail["usage"] == usage["usage"]
    assert tail["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_affinity_through_extra_headers_finds_the_cache_of_the_first_turn(
    worker: Worker, installation: ClientInstallation
) -> None:
    """Four sessions of two turns each: every second turn is cached, because it finds its replica again."""
    replicas = set()
    for number in range(4):
        session = f"worker-session-{number}"
        messages = [
            {"role": "system", "content": f"Session {number}. {SYSTEM}"},
            {"role": "user", "content": "Name a city."},
        ]
        inputs = {**INPUTS, "messages": messages}
        first = worker.result("raw", model=ALIAS, inputs=inputs, options=chat(session))
        reply = first["body"]["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Another."}]
        second = worker.result("raw", model=ALIAS, inputs=inputs, options=chat(session))
        assert first["headers"]["x-embergate-replica"] == second["headers"]["x-embergate-replica"]
        assert first["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        usage = second["body"]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.5 * first["body"]["usage"]["prompt_tokens"]
        records = installation.records(session, 2)
        assert [record["surface"] for record in records] == ["binding"] * 2
        assert records[1]["cached_prompt_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        replicas.add(first["headers"]["x-embergate-replica"])
    assert replicas == {"replica-0", "replica-1"}


def test_a_raw_response_and_a_call_through_a_gateway(worker: Worker) -> None:
    options = {"gateway": {"id": "gw1", "skipCache": True}}
    answer = worker.do("raw", model=ALIAS, inputs=INPUTS, options=options)
    raw = answer["result"]
    assert (raw["status"], raw["headers"]["content-type"]) == (200, "application/json")
    assert raw["body"]["object"] == "chat.completion"
    assert (
        answer["seen"]["aiGatewayLogId"] == answer["seen"]["lastRequestId"] == raw["headers"]["cf-ai-req-id"]
    )


def test_a_stream_of_json_is_read_as_inputs(worker: Worker) -> None:
    answer = worker.result(
        "streamInput", model=ALIAS, inputs={"max_tokens": 3}, body=INPUTS | {"max_tokens": 2}
    )
    assert answer["usage"]["completion_tokens"] == 2


def test_tools_are_called(worker: Worker) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    inputs = {**INPUTS, "max_tokens": 64, "reasoning_effort": None, "parallel_tool_calls": False}
    inputs |= {"tools": [tool], "tool_choice": "required"}
    answer = worker.result("run", model=TINY, inputs=inputs)
    call = answer["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_embeddings_come_in_their_native_form(worker: Worker) -> None:
    result = worker.result("run", model="@cf/baai/bge-small-en-v1.5", inputs={"text": ["a city", "a town"]})
    assert result["shape"] == [2, 384]
    first, second = result["data"]
    assert 0.3 < sum(x * y for x, y in zip(first, second, strict=True)) < 1


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_inference_upstream_errors_with_their_code(worker: Worker, stream: bool) -> None:
    action = "stream" if stream else "run"
    answer = worker.do(action, model="@cf/nobody/nothing", inputs=INPUTS)
    message = "5007: No such model @cf/nobody/nothing or task"
    assert answer["error"] == {"name": "InferenceUpstreamError", "message": message}
    assert answer["seen"]["lastRequestHttpStatusCode"] == 400
    assert answer["seen"]["lastRequestInternalStatusCode"] == 5007
    bad = worker.do(action, model=ALIAS, inputs={**INPUTS, "temperature": 3})
    assert bad["error"]["message"].startswith("5006: Bad input: '/temperature'")


def test_too_many_requests_are_3040(
    packages: ClientPackages, installation: ClientInstallation, tmp_path: Path
) -> None:
    with workerd(packages, SCRIPT, tmp_path, installation.environment_of(slow=True)) as worker:
        answers = [worker.do("run", model=ALIAS, inputs=INPUTS) for _ in range(2)]
        while "result" not in answers[0]:  # another test may have used up the account's one request
            time.sleep(SLOW_WAIT_S)
            answers = [worker.do("run", model=ALIAS, inputs=INPUTS) for _ in range(2)]
    assert answers[1]["error"]["name"] == "InferenceUpstreamError"
    assert answers[1]["error"]["message"].startswith("3040: ")
    assert answers[1]["seen"]["lastRequestHttpStatusCode"] == 429


@pytest.mark.parametrize(("how", "error"), [("signal", "AbortError"), ("cancel", None)])
def test_an_abort_ends_the_work_and_charges_what_was_generated(
    worker: Worker, installation: ClientInstallation, how: str, error: str | None
) -> None:
    session = f"worker-abort-{how}"
    result = worker.result("abort", model=ALIAS, inputs=LONG, options=chat(session), how=how)
    assert result["gotFirst"] is True
    assert result.get("error") == error
    (record,) = installation.records(session, 1)
    assert record["status"] == "client_disconnected"
    assert 1 <= record["completion_tokens"] < 1000
    assert installation.num_running() == 0


def test_a_batch_is_queued_and_polled_to_its_end(worker: Worker) -> None:
    requests = [
        {**INPUTS, "max_tokens": tokens, "ignore_eos": True, "external_reference": f"ref-{tokens}"}
        for tokens in (2, 3, 4)
    ]
    requests.append({"messages": "wrong", "external_reference": "bad"})
    queued = worker.result("run", model=ALIAS, inputs={"requests": requests}, options={"queueRequest": True})
    assert queued["status"] == "queued"
    deadline = time.monotonic() + 60
    answer: dict[str, Any] = {}
    while "responses" not in answer:
        assert time.monotonic() < deadline, answer
        time.sleep(0.5)
        answer = worker.result("run", model=ALIAS, inputs={"request_id": queued["request_id"]})
    *good, bad = answer["responses"]
    assert [each["id"] for each in answer["responses"]] == [0, 1, 2, 3]
    assert [each["external_reference"] for each in good] == ["ref-2", "ref-3", "ref-4"]
    assert [each["result"]["usage"]["completion_tokens"] for each in good] == [2, 3, 4]
    assert (bad["success"], bad["external_reference"]) == (False, "bad")


def test_models_are_listed(worker: Worker) -> None:
    rows = worker.result("models", params={"search": "kimi-k2.", "per_page": 2})
    assert len(rows) == 2
    assert all("kimi" in row["name"] for row in rows)
    assert worker.result("models", params={"page": 9}) == []
    assert worker.do("models", params={"page": "x"})["error"]["name"] == "AiInternalError"


def test_a_gateway_tells_its_addresses_and_what_a_request_used(worker: Worker) -> None:
    url = worker.result("gatewayUrl", provider="workers-ai")
    assert url.endswith("/ai/run")
    other = worker.do("gatewayUrl", provider="anthropic")["error"]
    assert other["name"] == "AiGatewayInternalError"
    assert "anthropic" in other["message"]
    answer = worker.do("run", model=ALIAS, inputs=INPUTS, options={"gateway": {"id": "gw1"}})
    usage, log_id = answer["result"]["usage"], answer["seen"]["aiGatewayLogId"]
    deadline = time.monotonic() + 15
    while "error" in (log := worker.do("gatewayLog", id=log_id)):
        assert log["error"]["name"] == "AiGatewayLogNotFound"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (log["result"]["tokens_in"], log["result"]["tokens_out"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert "no feedback" in worker.do("patchLog", id=log_id)["error"]["message"]


def test_files_become_markdown(worker: Worker) -> None:
    files = [
        {"name": "a.html", "type": "text/html", "text": "<h1>Head</h1><p>Text</p>"},
        {"name": "b.bin", "type": "application/x-unknown", "text": "?"},
    ]
    html, other = worker.result("toMarkdown", files=files)
    assert (html["format"], html["data"]) == ("markdown", "# Head\n\nText\n")
    assert other["format"] == "error"
    supported = worker.result("supported")
    assert ".pdf" in [each["extension"] for each in supported]
