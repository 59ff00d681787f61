"""Kimi K2.5 in small, in its own checkpoint format, behind the whole gateway: random text, exact books."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.chat import ChatClient, Outcome
from tests.support.installation import MODEL, Installation, totals_of

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

TINY = "kimi-k2.5-tiny"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"temperature": 0, "max_tokens": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("tiny"), TINY)
    installation.up()
    yield installation
    installation.down()
    assert installation.own_processes() == []


def counts(outcome: Outcome) -> tuple[int, int]:
    return outcome.prompt_tokens, outcome.completion_tokens


async def test_it_answers_on_both_surfaces_whole_and_streamed(tiny: Installation) -> None:
    before = await totals_of(tiny)
    async with ChatClient(tiny.account) as client:
        outcomes = [
            await ask(TINY, QUESTION, stream=is_stream, **SHORT)
            for ask in (client.run, client.complete)
            for is_stream in (False, True)
        ]
    for outcome in outcomes:
        assert outcome.is_complete, outcome
        assert 1 <= outcome.completion_tokens <= 12
        assert outcome.finish_reason == ("length" if outcome.completion_tokens == 12 else "stop")
    # Seven tokens at least are the template's: role, name and middle of both turns, end of turn, <think>.
    assert outcomes[0].prompt_tokens > 10
    assert len({counts(outcome) for outcome in outcomes}) == 1
    after = await totals_of(tiny, before["num_requests"] + 4)
    assert after["prompt_tokens"] - before["prompt_tokens"] == 4 * outcomes[0].prompt_tokens
    assert after["completion_tokens"] - before["completion_tokens"] == 4 * outcomes[0].completion_tokens
    assert after["amount_nanos"] > before["amount_nanos"]
    assert tiny.run("audit").returncode == 0


async def test_tools_are_taken_in_and_cost_prompt_tokens(tiny: Installation) -> None:
    async with ChatClient(tiny.account) as client:
        plain = await client.complete(TINY, QUESTION, **SHORT)
        for is_stream in (False, True):
            asked = await client.complete(
                TINY, QUESTION, stream=is_stream, tools=[TOOL], tool_choice="auto", **SHORT
            )
            assert asked.is_complete, asked
            assert asked.prompt_tokens > plain.prompt_tokens + 20


async def test_the_other_model_of_the_catalog_is_not_served(tiny: Installation) -> None:
    async with ChatClient(tiny.account) as client:
        assert (await client.complete(MODEL, QUESTION, **SHORT)).status in (400, 404)
    rows = {row["id"]: row for row in tiny.run_json("models", "list")}
    assert rows[MODEL]["replicas"] == []
    assert rows[TINY]["replicas"] == ["replica-0", "replica-1"]
    assert rows[TINY]["state"] == "ready"
