"""What an agent says: a stable beginning, then a conversation that grows with every turn."""

from __future__ import annotations

import json
import random
from typing import Any

SYSTEM = (
    "You are a careful assistant inside a software agent. You read what tools return and say in one short "
    "sentence what to do next. Be brief, be exact, name files by their path, never invent what a tool did "
    "not say. The tools are: read_file(path) returns the text of a file; search(pattern, folder) returns "
    "matching lines; run_tests(folder) returns the names of failing tests and their messages; "
    "write_file(path, text) replaces a file; ask(question) asks the person who gave the task. Prefer reading "
    "to guessing and small changes to large ones. When the tests pass, say so and stop."
)

TASKS = (
    "The tests of the parser fail since yesterday. Find out why and mend it.",
    "Add a retry with backoff to the client that fetches prices.",
    "The report page is slow for large accounts. Find the slow query.",
    "Rename the setting max_size to max_bytes everywhere, documentation included.",
)

_NOUNS = ("parser", "client", "cache", "index", "token", "buffer", "handler", "request", "schema", "ledger")
_VERBS = ("read", "write", "open", "close", "find", "store", "route", "limit", "retry", "query", "stream")


class Conversation:
    """One session of an agent. ``turns`` answers, then it is over."""

    def __init__(self, seed: int, num_turns: int) -> None:
        self._random = random.Random(seed)
        self.affinity = f"ses_{seed:016x}"
        self.num_turns = num_turns
        self.turn = 0
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self._random.choice(TASKS)},
        ]

    @property
    def is_over(self) -> bool:
        return self.turn >= self.num_turns

    def hear(self, answer: str) -> None:
        """Take the model's answer and add what the next tool returned."""
        self.turn += 1
        self.messages.append({"role": "assistant", "content": answer})
        self.messages.append({"role": "user", "content": self._tool_result()})

    def _tool_result(self) -> str:
        pick = self._random.choice
        name = f"{pick(_NOUNS)}_{pick(_NOUNS)}"
        lines = [
            f"src/{name}.py:{self._random.randint(1, 400)}: {pick(_NOUNS)}.{pick(_VERBS)}({pick(_NOUNS)})"
            for _ in range(self._random.randint(3, 8))
        ]
        return f"search returned {len(lines)} lines:\n" + "\n".join(lines) + "\nWhat next?"


_PIECES = ("content", "reasoning_content", "reasoning", "tool_calls")


class Answer:
    """Reads server-sent events line by line; ``problem`` says what is wrong with them, if anything.

    ``num_pieces`` counts what a reader sees come: text, thoughts, and parts of tool calls.
    """

    def __init__(self) -> None:
        self.text = ""
        self.usage: dict[str, Any] = {}
        self.is_done = False
        self.num_pieces = 0
        self.error = ""

    def read(self, line: bytes) -> None:
        """Take one line of the response."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        frame = json.loads(data)
        if "error" in frame:
            self.error = str(frame["error"].get("message", frame["error"]))
        self.usage = frame.get("usage") or self.usage
        for choice in frame.get("choices", []):
            delta = choice.get("delta", {})
            self.num_pieces += any(delta.get(name) for name in _PIECES)
            self.text += delta.get("content") or ""

    @property
    def problem(self) -> str:
        if self.error:
            return f"error in the stream: {self.error}"
        if not self.is_done:
            return "the stream ended without [DONE]"
        return "" if self.usage else "the stream has no usage"

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
