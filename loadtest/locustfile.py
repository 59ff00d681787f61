"""Agents at work: long, growing conversations, each with its affinity header, all of them streaming.

Run by ``make load`` against what ``make up`` started. Beside the usual figures are two more: ``TTFT`` (ms
to the first piece of text) and ``CACHED`` (percent of a later turn's prompt tokens that came from the prefix
cache). The exit code is not zero when a request failed or none was made.

Environment: EMBERGATE_ACCOUNT_ID, EMBERGATE_API_TOKEN; optional EMBERGATE_MODEL, LOAD_TURNS, LOAD_MAX_TOKENS.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from typing import Any

from locust import HttpUser, between, events, task
from locust.env import Environment

from loadtest.conversation import Answer, Conversation

MODEL = os.environ.get("EMBERGATE_MODEL", "@cf/moonshotai/kimi-k2.5")
NUM_TURNS = int(os.environ.get("LOAD_TURNS", "5"))
MAX_TOKENS = int(os.environ.get("LOAD_MAX_TOKENS", "24"))

_log = logging.getLogger(__name__)


class Agent(HttpUser):
    """Has one conversation after the other, and thinks for a moment between two turns."""

    wait_time = between(0.2, 1.0)

    def on_start(self) -> None:
        account_id, token = os.environ["EMBERGATE_ACCOUNT_ID"], os.environ["EMBERGATE_API_TOKEN"]
        self._path = f"/client/v4/accounts/{account_id}/ai/v1/chat/completions"
        self._authorization = f"Bearer {token}"
        self._seeds = itertools.count(random.getrandbits(48))
        self._conversation = self._begin()

    def _begin(self) -> Conversation:
        return Conversation(next(self._seeds), NUM_TURNS)

    @task
    def take_a_turn(self) -> None:
        """Ask, stream the answer, and go on with what a tool returned."""
        conversation = self._conversation
        answer = self._ask(conversation)
        if answer is None:
            self._conversation = self._begin()
            return
        if conversation.turn > 0 and answer.prompt_tokens:
            self._fire("CACHED", "cached share, %", 100.0 * answer.cached_tokens / answer.prompt_tokens)
        conversation.hear(answer.text)
        if conversation.is_over:
            self._conversation = self._begin()

    def _ask(self, conversation: Conversation) -> Answer | None:
        """One streamed request; None when it failed, which is in the statistics then."""
        name = "first turn" if conversation.turn == 0 else "later turn"
        answer = Answer()
        started = time.perf_counter()
        with self.client.post(
            self._path,
            json={
                "model": MODEL,
                "messages": conversation.messages,
                "max_tokens": MAX_TOKENS,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            headers={"Authorization": self._authorization, "x-session-affinity": conversation.affinity},
            name=name,
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return None
            for line in response.iter_lines(chunk_size=None):
                had_begun = answer.has_begun
                answer.read(line)
                if answer.has_begun and not had_begun:
                    self._fire("TTFT", name, 1000.0 * (time.perf_counter() - started))
            # Of a streamed response locust itself would take the time to its head.
            response.request_meta["response_time"] = 1000.0 * (time.perf_counter() - started)
            if answer.problem:
                response.failure(answer.problem)
                return None
        return answer

    def _fire(self, kind: str, name: str, value: float) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=value, response_length=0, exception=None, context={}
        )


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _judge(environment: Environment, **_: Any) -> None:
    """A run without a single answer proves nothing."""
    if not any(name.endswith("turn") and kind == "POST" for name, kind in environment.stats.entries):
        _log.error("no request was made")
        environment.process_exit_code = 2
