"""A real model behind both surfaces: sensible answers, cached second turns, figures that agree everywhere."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.chat import ChatClient, Outcome, converse
from tests.support.installation import ALIAS, MODEL, Installation
from tests.support.settled import settled_totals

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}

LONG_SYSTEM = (
    "You are a guide to the city of Paris. "
    + "The city has twenty districts, which are numbered in a spiral from the centre. " * 12
    + "Answer in one short sentence."
)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("surface", ["run", "v1"])
async def test_both_surfaces_answer_in_sensible_english(
    installation: Installation, surface: str, is_stream: bool
) -> None:
    async with ChatClient(installation.account) as client:
        ask = client.run if surface == "run" else client.complete
        outcome = await ask(MODEL, QUESTION, stream=is_stream, **GREEDY)
    assert outcome.is_complete, outcome
    assert "Paris" in outcome.text
    assert outcome.finish_reason == "stop"
    assert outcome.request_id
    assert outcome.prompt_tokens > outcome.completion_tokens > 0


async def test_the_four_ways_of_asking_say_the_same(installation: Installation) -> None:
    async with ChatClient(installation.account) as client:
        outcomes = [
            await ask(MODEL, QUESTION, stream=is_stream, **GREEDY)
            for ask in (client.run, client.complete)
            for is_stream in (False, True)
        ]
    assert len({outcome.text for outcome in outcomes}) == 1
    assert len({(outcome.prompt_tokens, outcome.completion_tokens) for outcome in outcomes}) == 1


async def test_an_alias_is_served_by_the_model_that_runs_and_the_answer_says_so(
    installation: Installation,
) -> None:
    async with ChatClient(installation.account) as client:
        for is_stream in (False, True):
            outcome = await client.complete(ALIAS, QUESTION, stream=is_stream, **GREEDY)
            assert {frame["model"] for frame in outcome.frames} == {MODEL}


async def test_a_native_stream_ends_in_a_native_tail_and_an_openai_stream_does_not(
    installation: Installation,
) -> None:
    async with ChatClient(installation.account) as client:
        native = await client.run(MODEL, QUESTION, stream=True, **GREEDY)
        openai = await client.complete(MODEL, QUESTION, stream=True, **GREEDY)
    assert native.frames[-1]["response"] == ""
    assert native.frames[-1]["usage"]["neurons"] > 0
    assert all("choices" in frame and "response" not in frame for frame in openai.frames)


async def test_a_second_turn_is_cached_and_every_book_says_the_same(installation: Installation) -> None:
    before = await settled_totals(installation)
    async with ChatClient(installation.account) as client:
        questions = ["Which district is in the centre?", "And which one is last?"]
        first, second = await converse(
            client, MODEL, "two-turns", questions, LONG_SYSTEM, stream=True, **GREEDY
        )
    assert first.is_complete
    assert second.is_complete
    assert first.prompt_tokens > 200
    assert second.prompt_tokens > 250
    assert second.replica == first.replica
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16 - 16
    after = await settled_totals(installation, before["num_requests"] + 2)
    assert after["prompt_tokens"] - before["prompt_tokens"] == both(first, second, "prompt_tokens")
    assert after["completion_tokens"] - before["completion_tokens"] == both(
        first, second, "completion_tokens"
    )
    cached = after["cached_prompt_tokens"] - before["cached_prompt_tokens"]
    assert cached == both(first, second, "cached_tokens")
    cost = after["amount_nanos"] - before["amount_nanos"]
    undiscounted = after["undiscounted_nanos"] - before["undiscounted_nanos"]
    assert cost == expected_nanos(first) + expected_nanos(second)
    assert undiscounted - cost == cached * 40
    assert installation.run("audit").returncode == 0


async def test_a_conversation_of_another_account_shares_no_cache(installation: Installation) -> None:
    account = installation.run_json("accounts", "create", "other")[0]
    token = installation.run_json("tokens", "create", "--account", account["id"])["token"]
    dev = installation.account
    other = type(dev)(dev.url, account["id"], token)
    async with ChatClient(dev) as mine, ChatClient(other) as theirs:
        for client in (mine, theirs):
            (outcome,) = await converse(client, MODEL, "shared", ["Hello?"], LONG_SYSTEM + " Now.", **GREEDY)
        assert outcome.cached_tokens == 0


async def test_a_revoked_token_is_refused_within_seconds(installation: Installation) -> None:
    dev = installation.account
    made = installation.run_json("tokens", "create", "--account", dev.account_id)
    async with ChatClient(type(dev)(dev.url, dev.account_id, made["token"])) as client:
        assert (await client.run(MODEL, QUESTION, **GREEDY)).status == 200
        assert installation.run("tokens", "revoke", made["id"]).returncode == 0
        async with asyncio.timeout(10):
            while (await client.run(MODEL, QUESTION, **GREEDY)).status != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.3)


def both(first: Outcome, second: Outcome, count: str) -> int:
    return int(getattr(first, count) + getattr(second, count))


def expected_nanos(outcome: Outcome) -> int:
    """At $0.05, $0.01 and $0.20 per million: 50, 10 and 200 nano-dollars a token."""
    fresh = outcome.prompt_tokens - outcome.cached_tokens
    return fresh * 50 + outcome.cached_tokens * 10 + outcome.completion_tokens * 200
