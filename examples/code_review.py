"""A code-review agent: a diff goes in, it reads the files that it wants to see, a review comes out as JSON.

    set -a; . .embergate/dev.env; set +a
    git diff HEAD~1 | python examples/code_review.py

Nothing but OpenAI's SDK is needed (``pip install openai``). Three things to see:

- every request of a review carries the same ``x-session-affinity``, so that each turn finds the turns before
  it in the prefix cache of one replica;
- ``tools`` let the model read files, within the repository and a number of rounds;
- ``response_format`` holds the answer to a schema while it is generated: what comes out always parses.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from agent_bill import bill_of, connect
from openai import BadRequestError, OpenAI

INSTRUCTIONS = """You review changes to a code base. Read what you need with the tool, then say what is wrong
with the change: faults first, then risks. Do not praise. Name the file and the line."""
MAX_FINDINGS = 4


class Repository:
    """What the agent may see: the changed files and their neighbours, each cut to ``max_chars``."""

    def __init__(self, root: Path, diff: str, *, max_files: int, max_chars: int) -> None:
        self._root = root.resolve()
        self._max_chars = max_chars
        self.changed: list[str] = re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE)
        if not self.changed:
            raise SystemExit("there is no change to review: give a unified diff (git diff) on standard input")
        self.readable = self._with_neighbours()[:max_files]

    def _with_neighbours(self) -> list[str]:
        listed = subprocess.run(
            ["git", "-C", str(self._root), "ls-files"], capture_output=True, text=True, check=False
        ).stdout.splitlines()
        folders = {str(Path(name).parent) for name in self.changed}
        neighbours = [name for name in listed if str(Path(name).parent) in folders]
        return list(dict.fromkeys([*self.changed, *neighbours]))

    def read(self, name: str) -> str:
        """A file's beginning; a sentence when the agent may not or cannot read it."""
        path = (self._root / name).resolve()
        if name not in self.readable or not path.is_relative_to(self._root):
            return f"{name} is not one of the readable files."
        try:
            return path.read_text(errors="replace")[: self._max_chars]
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"


def read_file_tool(repository: Repository) -> dict[str, Any]:
    """The names are in the schema, so the model cannot invent one."""
    path = {"type": "string", "enum": repository.readable}
    parameters = {
        "type": "object",
        "properties": {"path": path},
        "required": ["path"],
        "additionalProperties": False,
    }
    function = {"name": "read_file", "description": "Read a file.", "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def review_format(repository: Repository) -> dict[str, Any]:
    """What a review is."""
    finding = {
        "file": {"type": "string", "enum": repository.changed},
        "line": {"type": "integer", "minimum": 1, "maximum": 9999},
        "severity": {"type": "string", "enum": ["fault", "risk", "style"]},
        "message": {"type": "string", "maxLength": 160},
    }
    review = {
        "verdict": {"type": "string", "enum": ["approve", "comment", "request_changes"]},
        "summary": {"type": "string", "maxLength": 240},
        "findings": {"type": "array", "maxItems": MAX_FINDINGS, "items": _object(finding)},
    }
    schema = {"name": "review", "schema": _object(review), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class Reviewer:
    """One review: one session, one conversation that only grows."""

    def __init__(self, client: OpenAI, model: str, session: str, repository: Repository) -> None:
        self._client = client
        self._fixed: dict[str, Any] = {
            "model": model,
            "reasoning_effort": "none",
            "temperature": 0.2,
            "extra_headers": {"x-session-affinity": session},
        }
        self._repository = repository
        self.num_requests = 0

    def review(self, diff: str, *, max_rounds: int, max_tokens: int) -> Any:
        """Read for at most ``max_rounds`` rounds, then judge.

        Raises:
            SystemExit: the answer was cut by ``max_tokens``.
        """
        messages: list[Any] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"Review this change:\n\n{diff}"},
        ]
        tools = [read_file_tool(self._repository)]
        try:
            for number in range(max_rounds):
                if not self._read(messages, tools, is_first=number == 0):
                    break
        except BadRequestError as error:
            if "tools" not in str(error):
                raise
            tools = []  # this model calls none: read the changed files for it
            texts = [f"{name}:\n{self._repository.read(name)}" for name in self._repository.changed]
            messages.append({"role": "user", "content": "\n\n".join(texts)})
        messages.append({"role": "user", "content": "Now write the review as JSON."})
        return self._judge(messages, tools, max_tokens)

    def _read(self, messages: list[Any], tools: list[Any], *, is_first: bool) -> bool:
        """One round; whether the model wanted to read anything. The first round always reads."""
        choice = "required" if is_first else "auto"
        answer = self._ask(messages, tools=tools, tool_choice=choice, max_tokens=200)
        if answer["finish_reason"] != "tool_calls":
            return False
        messages.append(answer["message"])
        for call in answer["message"]["tool_calls"]:
            name = str(json.loads(call["function"]["arguments"])["path"])
            print(f"  reads {name}", file=sys.stderr)
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": self._repository.read(name)}
            )
        return True

    def _judge(self, messages: list[Any], tools: list[Any], max_tokens: int) -> Any:
        """The tools stay in the request, because they stand before the conversation: leaving them out changes
        the prompt's beginning, and nothing of it is cached. Only a model that reads on is asked without.
        """
        wanted = {"response_format": review_format(self._repository), "max_tokens": max_tokens}
        answer = self._ask(messages, **wanted, **({"tools": tools} if tools else {}))
        if answer["finish_reason"] == "tool_calls":
            answer = self._ask(messages, **wanted)
        if answer["finish_reason"] != "stop":
            raise SystemExit(f"there is no review ({answer['finish_reason']}): raise --max-tokens")
        return json.loads(answer["message"]["content"])

    def _ask(self, messages: list[Any], **fields: Any) -> Any:
        """One request of the session: its only choice, as plain JSON."""
        answer = self._client.chat.completions.create(messages=messages, **self._fixed, **fields)
        self.num_requests += 1
        return answer.choices[0].model_dump(exclude_none=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Review a diff (standard input) with an agent.")
    parser.add_argument("--diff", type=argparse.FileType(), default=sys.stdin, help="file; standard input")
    parser.add_argument("--repository", type=Path, default=Path.cwd(), help="its root; here")
    parser.add_argument("--model", default="@cf/moonshotai/kimi-k2.5")
    parser.add_argument("--session", default=f"code-review-{uuid.uuid4().hex[:8]}", help="the affinity key")
    parser.add_argument("--max-rounds", type=int, default=3, help="of reading")
    parser.add_argument("--max-diff-chars", type=int, default=8_000)
    parser.add_argument("--max-file-chars", type=int, default=4_000)
    parser.add_argument("--max-tokens", type=int, default=1_500, help="of the review")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    diff = chosen.diff.read()[: chosen.max_diff_chars]
    repository = Repository(chosen.repository, diff, max_files=40, max_chars=chosen.max_file_chars)
    client = connect()
    reviewer = Reviewer(client, chosen.model, chosen.session, repository)
    review = reviewer.review(diff, max_rounds=chosen.max_rounds, max_tokens=chosen.max_tokens)
    print(json.dumps(review, indent=2, ensure_ascii=False))
    bill = bill_of(client, reviewer.num_requests, session=chosen.session)
    print("\n".join(bill.lines()), file=sys.stderr)


if __name__ == "__main__":
    main()
