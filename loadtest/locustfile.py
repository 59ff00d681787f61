"""Users of several kinds, all of them streaming: coding agents, chats, summaries, tool loops, images.

Run by ``make load`` against what ``make up`` started; name classes to let only those loose (``ToolLoop`` and
``ImageQuestion`` run only so, as not every model takes tools or sees). Beside the usual figures each kind of
request has ``TTFT`` (ms to the first piece of text, thought or tool call), ``INTER-TOKEN`` (ms between two
tokens), ``TOKENS/S`` (of one stream), ``CACHED`` (percent of a later turn's prompt tokens) and ``LEFT`` (ms
after which a client closed its connection on purpose). Failures are counted by status and code. The exit code
is not zero when a bar is missed (by default: when anything failed), or when no request was made.

Environment: EMBERGATE_ACCOUNT_ID, EMBERGATE_API_TOKEN; optional EMBERGATE_MODEL.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import sys
import time
from argparse import ArgumentParser
from typing import Any, ClassVar

from locust import HttpUser, between, constant, events, task
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtest.conversation import Answer
from loadtest.scenarios import AgentTalk, ChatTalk, ImageTalk, SummaryTalk, Talk, ToolTalk
from loadtest.thresholds import Thresholds

MODEL = os.environ.get("EMBERGATE_MODEL", "@cf/moonshotai/kimi-k2.5")

_log = logging.getLogger(__name__)


def _is_named(scenario: str) -> bool:
    """Whether the command line asks for a scenario by its name."""
    return scenario in sys.argv or scenario in os.environ.get("LOCUST_USER_CLASSES", "").split()


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: ArgumentParser, **_: Any) -> None:
    """Options of our own; the web page shows them too."""
    group = parser.add_argument_group("Embergate")
    add = group.add_argument
    add("--turns", type=int, env_var="LOAD_TURNS", default=5, help="Answers of a conversation")
    add("--max-tokens", type=int, env_var="LOAD_MAX_TOKENS", default=24, help="Length of an answer")
    add("--affinity", choices=("on", "off"), env_var="LOAD_AFFINITY", default="on",
        help="Whether turns name their session")  # fmt: skip
    add("--leave-share", type=float, env_var="LOAD_LEAVE_SHARE", default=0.05,
        help="Share of answers that are left in the middle")  # fmt: skip
    add("--max-fail-ratio", type=float, default=0.0, help="Share of requests that may fail")
    add("--max-ttft-p95", type=float, default=0.0, help="ms; 0: no bar")
    add("--min-cached-share", type=float, default=0.0, help="Of later turns, 0 to 1; 0: no bar")


class Talker(HttpUser):
    """Has one conversation after the other."""

    abstract = True
    kind = ""
    make_talk: ClassVar[type[Any]]

    def on_start(self) -> None:
        account_id, token = os.environ["EMBERGATE_ACCOUNT_ID"], os.environ["EMBERGATE_API_TOKEN"]
        self._options = self.environment.parsed_options
        self._path = f"/client/v4/accounts/{account_id}/ai/v1/chat/completions"
        self._authorization = f"Bearer {token}"
        self._seeds = itertools.count(random.getrandbits(48))
        self._talk = self._begin()

    def _begin(self) -> Talk:
        talk: Talk = self.make_talk(next(self._seeds), self._options.turns)
        return talk

    @task
    def take_a_turn(self) -> None:
        """Ask, stream the answer, and go on from it."""
        talk = self._talk
        answer = self._ask(talk)
        if answer is None:
            self._talk = self._begin()
            return
        if talk.turn > 0 and answer.prompt_tokens:
            self._fire("CACHED", "%", 100.0 * answer.cached_tokens / answer.prompt_tokens)
        talk.hear(answer)
        if talk.is_over:
            self._talk = self._begin()

    def _ask(self, talk: Talk) -> Answer | None:
        """One streamed request; None when it failed or was left, which is in the statistics then."""
        headers = {"Authorization": self._authorization}
        if self._options.affinity == "on":
            headers["x-session-affinity"] = talk.affinity
        leave_after = random.randint(1, 6) if random.random() < self._options.leave_share else 0
        body = {
            **talk.body(), "model": MODEL, "max_tokens": self._options.max_tokens,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        name = f"{self.kind}, {'first' if talk.turn == 0 else 'later'} turn"
        with self.client.post(
            self._path, json=body, headers=headers, name=name, stream=True, catch_response=True
        ) as response:
            started = time.perf_counter() - response.request_meta["response_time"] / 1000.0
            if response.status_code != 200:
                response.failure(_reason(response.status_code, response.text))
                return None
            return self._read(response, leave_after, started)

    def _read(self, response: Any, leave_after: int, started: float) -> Answer | None:
        answer = Answer()
        num_pieces, first_s = 0, 0.0
        for line in response.iter_lines(chunk_size=None):
            answer.read(line)
            if answer.num_pieces == num_pieces:
                continue
            num_pieces = answer.num_pieces
            if num_pieces == 1:
                first_s = time.perf_counter()
                self._fire("TTFT", "ms", 1000.0 * (first_s - started))
            if num_pieces == leave_after:
                response.close()
                self._fire("LEFT", "ms", 1000.0 * (time.perf_counter() - started))
                response.success()
                return None
        ended = time.perf_counter()
        # Of a streamed response locust itself would take the time to its head.
        response.request_meta["response_time"] = 1000.0 * (ended - started)
        if answer.problem:
            response.failure(answer.problem)
            return None
        num_gaps = int(answer.usage.get("completion_tokens", 0)) - 1
        if first_s and num_gaps > 0 and ended > first_s:
            self._fire("INTER-TOKEN", "ms", 1000.0 * (ended - first_s) / num_gaps)
            self._fire("TOKENS/S", "tokens a second", num_gaps / (ended - first_s))
        return answer

    def _fire(self, kind: str, unit: str, value: float) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=f"{self.kind}, {unit}",
            response_time=value,
            response_length=0,
            exception=None,
            context={},
        )


class CodingAgent(Talker):
    """An agent that edits code."""

    weight = 5
    kind = "agent"
    make_talk = AgentTalk
    wait_time = between(0.2, 1.0)


class Chat(Talker):
    """A person, who thinks for longer."""

    weight = 3
    kind = "chat"
    make_talk = ChatTalk
    wait_time = between(1.0, 4.0)


class Summariser(Talker):
    """A job that asks as fast as it is answered."""

    weight = 1
    kind = "summary"
    make_talk = SummaryTalk
    wait_time = constant(0)


class ToolLoop(Talker):
    """Calls of tools, one after the other. Only when it is named: a model must take tools."""

    abstract = not _is_named("ToolLoop")

    weight = 2
    kind = "tools"
    make_talk = ToolTalk
    wait_time = between(0.1, 0.5)


class ImageQuestion(Talker):
    """Questions about pictures. Only when it is named: a model must see."""

    abstract = not _is_named("ImageQuestion")

    weight = 1
    kind = "image"
    make_talk = ImageTalk
    wait_time = between(1.0, 3.0)


def _reason(status: int, text: str) -> str:
    """Status and code, without what differs from request to request, so that failures add up."""
    try:
        body = json.loads(text)
        error = body["errors"][0] if body.get("errors") else body["error"]
        return f"{status}, code {error.get('code')}"
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):
        return str(status)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _judge(environment: Environment, **_: Any) -> None:
    """Set the exit code. A run without a single answer proves nothing."""
    if isinstance(environment.runner, WorkerRunner):
        return
    entries, options = environment.stats.entries, environment.parsed_options
    assert options is not None
    if not any(kind == "POST" for _, kind in entries):
        _log.error("no request was made")
        environment.process_exit_code = 2
        return
    bars = Thresholds(options.max_fail_ratio, options.max_ttft_p95, options.min_cached_share)
    missed = bars.missed(entries)
    for line in missed:
        _log.error("MISSED %s", line)
    environment.process_exit_code = 1 if missed else 0
