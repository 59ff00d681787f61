"""The official SDKs of Cloudflare and OpenAI, and LangChain's chat model: unchanged, pointed here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.client_installation import SLOW_WAIT_S, TINY, ClientInstallation
from tests.support.client_packages import ClientPackages
from tests.support.installation import ALIAS, MODEL

NAMES = [MODEL, *(f"@cf/moonshotai/kimi-{version}" for version in ("k2.5", "k2.6", "k2.7-code"))]


class Programs:
    """Runs a client program against the installation."""

    def __init__(self, packages: ClientPackages, installation: ClientInstallation) -> None:
        self._packages = packages
        self._installation = installation

    def run(self, program: str, *, what: str = "") -> Any:
        """What ``program`` saw; with ``what="retry"`` as the account that gets few requests."""
        environment = self._installation.environment_of(slow=what == "retry")
        environment |= {"MODEL": ALIAS, "TINY": TINY, "WHAT": what}
        run = self._packages.run_node if program.endswith(".mjs") else self._packages.run_python
        return run(program, environment)


@pytest.fixture(scope="module")
def programs(packages: ClientPackages, installation: ClientInstallation) -> Programs:
    return Programs(packages, installation)


@pytest.mark.parametrize("program", ["cloudflare_sdk.mjs", "cloudflare_sdk.py"])
def test_cloudflares_sdks_run_stream_list_and_verify(
    programs: Programs, installation: ClientInstallation, program: str
) -> None:
    seen = programs.run(program)
    assert seen["run"]["object"] == "chat.completion"
    assert seen["run"]["choices"][0]["message"]["content"]
    assert seen["contentType"].startswith("text/event-stream")
    *_, tail, done = [frame for frame in seen["stream"].split("\n\n") if frame]
    assert done == "data: [DONE]"
    assert json.loads(tail.removeprefix("data: "))["usage"]["neurons"] > 0
    assert seen["models"][: len(NAMES)] == NAMES, "paged one at a time, to the empty page"
    assert set(seen["schema"]) == {"input", "output"}
    assert "Text Generation" in seen["tasks"]
    assert "moonshotai" in seen["authors"]
    assert seen["token"]["status"] == seen["accountToken"]["status"] == "active"
    assert seen["accounts"] == [installation.account.account_id]
    assert ".pdf" in seen["supported"]
    if program.endswith(".mjs"):  # the Python SDK of this version fails before it sends a file
        html, other = seen["markdown"]
        assert (html["name"], html["format"], html["data"]) == ("a.html", "markdown", "# Head\n")
        assert (other["name"], other["format"]) == ("b.bin", "error")
    assert seen["refusal"]["name"] == "BadRequestError"
    assert seen["refusal"]["errors"][0]["code"] == 5007


@pytest.mark.parametrize("program", ["openai_sdk.mjs", "openai_sdk.py"])
def test_openais_sdks_run_stream_list_and_call_tools(programs: Programs, program: str) -> None:
    seen = programs.run(program)
    whole = seen["run"]["choices"][0]["message"]["content"]
    assert whole
    *chunks, last = seen["chunks"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == seen["run"]["usage"]["completion_tokens"]
    assert seen["models"][: len(NAMES)] == NAMES
    assert seen["tool"]["finish_reason"] == "tool_calls"
    call = seen["tool"]["message"]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"])["city"] in ("Rome", "Paris")
    assert seen["refusal"] == {"name": "BadRequestError", "status": 400}


def test_langchains_chat_model_invokes_streams_calls_and_structures(programs: Programs) -> None:
    seen = programs.run("langchain_chat.py")
    assert seen["run"]["text"]
    assert seen["stream"]["text"] == seen["run"]["text"]
    (usage,) = seen["stream"]["usages"]
    for key in ("input_tokens", "output_tokens", "total_tokens"):
        assert usage[key] == seen["run"]["usage"][key] > 0
    assert seen["tools"][0]["name"] == "weather"
    assert seen["tools"][0]["args"]["city"] in ("Rome", "Paris")
    assert seen["structured"]["city"] in ("Rome", "Paris")


@pytest.mark.parametrize(
    "program",
    ["cloudflare_sdk.mjs", "cloudflare_sdk.py", "openai_sdk.mjs", "openai_sdk.py", "langchain_chat.py"],
)
def test_a_429_is_retried_after_the_time_that_it_names(programs: Programs, program: str) -> None:
    """Two requests in a row of an account that gets one in two seconds: both are answered, in time."""
    seen = programs.run(program, what="retry")
    assert len(seen["answers"]) == 2
    assert all(seen["answers"])
    assert seen["seconds"] >= SLOW_WAIT_S - 0.5, "the second waited"
    assert seen["seconds"] < 60
    if "refusal" in seen:  # without retries the same is an error that says so
        assert seen["refusal"]["status"] == 429
        assert seen["refusal"]["name"] == "RateLimitError"
        if errors := seen["refusal"].get("errors"):
            assert errors[0]["code"] == 3021
