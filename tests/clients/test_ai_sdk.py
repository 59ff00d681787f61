"""workers-ai-provider under the AI SDK, over REST: what agents are built with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.client_installation import TINY, ClientInstallation
from tests.support.client_packages import ClientPackages
from tests.support.installation import ALIAS

SYSTEM = "You answer every question about cities in one short sentence, and never ask back. " * 12
SESSION = "ai-sdk-session"


@pytest.fixture(scope="module")
def seen(packages: ClientPackages, installation: ClientInstallation) -> Any:
    environment = installation.environment_of() | {"MODEL": ALIAS, "TINY": TINY, "SYSTEM": SYSTEM}
    return packages.run_node("ai_sdk.mjs", environment)


def test_generate_text(seen: Any) -> None:
    assert seen["generate"]["text"]
    assert seen["generate"]["finishReason"] in ("stop", "length")
    assert 1 <= seen["generate"]["usage"]["outputTokens"] <= 8


def test_stream_text(seen: Any) -> None:
    stream = seen["stream"]
    assert "".join(stream["pieces"]) == stream["text"] != ""
    assert len(stream["pieces"]) > 1
    assert stream["finishReason"] in ("stop", "length")
    assert 1 <= stream["usage"]["outputTokens"] <= 8


def test_cached_tokens_are_visible_and_those_of_the_bill(seen: Any, installation: ClientInstallation) -> None:
    cached = seen["stream"]["usage"]["inputTokenDetails"]["cacheReadTokens"]
    assert cached > 0.5 * seen["generate"]["usage"]["inputTokens"]
    first, second, *_ = installation.records(SESSION, 3)
    assert (first["cached_prompt_tokens"], second["cached_prompt_tokens"]) == (0, cached)
    assert second["prompt_tokens"] == seen["stream"]["usage"]["inputTokens"]
    sessions = {request["session"] for request in seen["requests"]}
    assert sessions == {SESSION, None}


def test_tools_make_a_round_trip(seen: Any) -> None:
    first, last = seen["tools"]
    assert first["finishReason"] == "tool-calls"
    assert first["calls"][0]["city"] in ("Rome", "Paris")
    assert first["results"][0]["celsius"] == 21
    assert last["calls"] == []
    assert last["finishReason"] in ("stop", "length")


def test_an_object_meets_its_schema(seen: Any) -> None:
    assert seen["object"]["city"] in ("Rome", "Paris")
