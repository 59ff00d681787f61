"""Forty conversations at once over two replicas: sticky, cached, balanced, and all of them on the books."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.support.chat import ChatClient, Outcome, converse
from tests.support.installation import ALIAS, Installation
from tests.support.settled import settled_totals

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

NUM_SESSIONS = 40
NUM_TURNS = 5
BLOCK_SIZE = 16

QUESTIONS = [f"Step {turn}: which file should be read next, and why that one?" for turn in range(NUM_TURNS)]


def system_of(session: int) -> str:
    """A beginning that no two sessions share, so that only a conversation's own turns can be cached."""
    return (
        f"Session {session * 7919} of a software agent. It reads files, runs tests, and answers very briefly."
    )


def ceiling_of(conversation: list[Outcome]) -> int:
    """All earlier full blocks: what a turn's predecessors left in the cache, in tokens."""
    return sum(
        (earlier.prompt_tokens + earlier.completion_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        for earlier in conversation[:-1]
    )


async def test_forty_sessions_of_five_turns(installation: Installation) -> None:
    before = await settled_totals(installation)
    async with ChatClient(installation.account, timeout_s=280) as client:
        conversations = await asyncio.gather(
            *(
                converse(
                    client,
                    ALIAS,
                    f"ses_{session:04d}",
                    QUESTIONS,
                    system_of(session),
                    stream=True,
                    temperature=0,
                    max_tokens=6,
                )
                for session in range(NUM_SESSIONS)
            )
        )
    outcomes = [outcome for conversation in conversations for outcome in conversation]
    assert [outcome for outcome in outcomes if not outcome.is_complete] == []

    for conversation in conversations:
        assert len({outcome.replica for outcome in conversation}) == 1
    load = Counter(outcome.replica for outcome in outcomes)
    assert set(load) == {"replica-0", "replica-1"}
    assert max(load.values()) / (len(outcomes) / 2) < 1.5

    num_prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    num_cached = sum(outcome.cached_tokens for outcome in outcomes)
    ceiling = sum(ceiling_of(conversation) for conversation in conversations) / num_prompt
    share = num_cached / num_prompt
    assert abs(ceiling - share) < 0.03, f"cached {share:.1%}, ceiling {ceiling:.1%}"

    after = await settled_totals(installation, before["num_requests"] + NUM_SESSIONS * NUM_TURNS)
    assert after["prompt_tokens"] - before["prompt_tokens"] == num_prompt
    assert after["cached_prompt_tokens"] - before["cached_prompt_tokens"] == num_cached
    audit = await asyncio.to_thread(installation.run, "audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
