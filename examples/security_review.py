"""A security-review agent: it walks a repository, a file a request, behind one long prefix that all share.

    set -a; . .embergate/dev.env; set +a
    python examples/security_review.py --repository . --max-files 50          # live
    python examples/security_review.py --repository . --batch                 # over night, at batch prices

The instructions, the checklist and the map of the repository come first and are the same in every request, so
that after the first one only the file itself is computed. ``x-session-affinity`` keeps all requests on the
replica that has the prefix; ``--no-affinity`` shows what happens without. Answers are held to a schema.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agent_bill import Bill, bill_of, connect
from openai import OpenAI

INSTRUCTIONS = """You look for security faults in one file at a time of the repository that is listed below.
Report only what an attacker could use, with the line and one of the kinds of the checklist."""
CHECKLIST = {
    "injection": "Text of a client becomes a query, a command, a path or a template without being escaped.",
    "secrets": "A password, a token or a key is in the code, in a log line or in an error message.",
    "access": "Something is read or changed without asking whether the caller may.",
    "resources": "A client decides how much memory, time or disk is used, and nothing bounds it.",
    "crypto": "A comparison leaks time, a random number can be guessed, a signature is not checked.",
}
SUFFIXES = (".py", ".js", ".ts", ".go", ".rs", ".c", ".cu", ".sh", ".yaml", ".html", ".sql")
ANSWER = {
    "type": "object",
    "properties": {
        "risk": {"type": "string", "enum": ["none", "low", "medium", "high"]},
        "findings": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "line": {"type": "integer", "minimum": 1, "maximum": 9999},
                    "kind": {"type": "string", "enum": list(CHECKLIST)},
                    "why": {"type": "string", "maxLength": 100},
                },
                "required": ["line", "kind", "why"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["risk", "findings"],
    "additionalProperties": False,
}


class Walk:
    """The files of a repository, and the prefix that their requests share."""

    def __init__(self, root: Path, chosen: argparse.Namespace) -> None:
        self._root = root
        self._max_file_chars = chosen.max_file_chars
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=False
        )
        names = listed.stdout.splitlines() or _found(root)
        readable = [name for name in names if name.endswith(SUFFIXES) and (root / name).is_file()]
        self.files = readable[: chosen.max_files]
        if not self.files:
            raise SystemExit(f"{root} has no files to look at")
        self.prefix = self._prefix(names, chosen.focus, chosen.max_prefix_chars)

    def _prefix(self, names: list[str], focus: str, max_chars: int) -> str:
        checks = "\n".join(f"- {kind}: {what}" for kind, what in CHECKLIST.items())
        head = f"{INSTRUCTIONS}\nLook for {focus} above all.\n\n{checks}\n\nThe repository:\n"
        return (head + "\n".join(names))[:max_chars]

    def messages(self, name: str) -> list[dict[str, str]]:
        """What is the same first, what differs last: only what is before the first difference is cached."""
        text = (self._root / name).read_text(errors="replace")[: self._max_file_chars]
        return [
            {"role": "system", "content": self.prefix},
            {"role": "user", "content": f"{name}:\n\n{text}"},
        ]

    def body(self, name: str, model: str, max_tokens: int) -> dict[str, Any]:
        """The request about one file; live and batch send the same."""
        schema = {"name": "report", "schema": ANSWER, "strict": True}
        return {
            "model": model,
            "messages": self.messages(name),
            "response_format": {"type": "json_schema", "json_schema": schema},
            "reasoning_effort": "none",
            "temperature": 0.2,
            "max_tokens": max_tokens,
        }


def _found(root: Path) -> list[str]:
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return [str(path.relative_to(root)) for path in paths]


def review_live(client: OpenAI, walk: Walk, chosen: argparse.Namespace) -> tuple[dict[str, Any], Bill]:
    """One request for each file, ``--parallel`` at once; the first goes alone and fills the cache."""
    sessions = [
        chosen.session if chosen.affinity else f"{chosen.session}-{number}"
        for number in range(len(walk.files))
    ]

    def ask(name: str, session: str) -> Any:
        answer = client.chat.completions.create(
            **walk.body(name, chosen.model, chosen.max_tokens),
            extra_headers={"x-session-affinity": session},
        )
        print(f"  {name}", file=sys.stderr)
        return report_of(answer.model_dump())

    reports = [ask(walk.files[0], sessions[0])]
    with ThreadPoolExecutor(chosen.parallel) as pool:
        reports += pool.map(ask, walk.files[1:], sessions[1:])
    bill = bill_of(client, len(walk.files), session=sorted(set(sessions)))
    return dict(zip(walk.files, reports, strict=True)), bill


def submit(client: OpenAI, walk: Walk, chosen: argparse.Namespace) -> str:
    """Queue all files as one batch; its id."""
    lines = [
        json.dumps(
            {
                "custom_id": name,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": walk.body(name, chosen.model, chosen.max_tokens),
            }
        )
        for name in walk.files
    ]
    content = "\n".join(lines).encode()
    file = client.files.create(file=("security-review.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def collect(client: OpenAI, batch_id: str, poll_s: float) -> tuple[dict[str, Any], Bill]:
    """Wait for a batch, and read what came of it.

    Raises:
        SystemExit: the batch ended without results.
    """
    batch = client.batches.retrieve(batch_id)
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(poll_s)
        batch = client.batches.retrieve(batch_id)
    if batch.output_file_id is None:
        raise SystemExit(f"batch {batch_id} is {batch.status} and has no results")
    reports = dict(_reports(client.files.content(batch.output_file_id).text))
    return reports, bill_of(client, len(reports), batch=batch_id)


def _reports(output: str) -> Iterator[tuple[str, Any]]:
    for line in output.splitlines():
        item = json.loads(line)
        yield item["custom_id"], report_of(item["response"]["body"])


def report_of(completion: dict[str, Any]) -> Any:
    """The report in an answer; None when it was cut."""
    choice = completion["choices"][0]
    return json.loads(choice["message"]["content"]) if choice["finish_reason"] == "stop" else None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Look for security faults in the files of a repository.")
    parser.add_argument("--repository", type=Path, default=Path.cwd(), help="its root; here")
    parser.add_argument("--model", default="@cf/moonshotai/kimi-k2.5")
    parser.add_argument("--focus", choices=list(CHECKLIST), default="injection")
    parser.add_argument("--max-files", type=int, default=50)
    parser.add_argument("--max-file-chars", type=int, default=600)
    parser.add_argument("--max-prefix-chars", type=int, default=6_000)
    parser.add_argument("--max-tokens", type=int, default=400, help="of one report")
    parser.add_argument("--parallel", type=int, default=2, help="requests at once")
    parser.add_argument("--session", default=f"security-{uuid.uuid4().hex[:8]}", help="the affinity key")
    parser.add_argument("--no-affinity", dest="affinity", action="store_false", help="a new key each time")
    parser.add_argument("--batch", action="store_true", help="queue it, and wait")
    parser.add_argument("--submit-only", action="store_true", help="with --batch: print its id and leave")
    parser.add_argument("--collect", metavar="BATCH", help="fetch the results of a batch")
    parser.add_argument("--poll-s", type=float, default=2.0, help="seconds between looks at a batch")
    return parser.parse_args()


def main() -> None:
    chosen, client = options(), connect()
    if chosen.collect:
        reports, bill = collect(client, chosen.collect, chosen.poll_s)
    else:
        walk = Walk(chosen.repository, chosen)
        if chosen.batch:
            batch_id = submit(client, walk, chosen)
            print(f"batch {batch_id}: --collect fetches its results", file=sys.stderr)
            if chosen.submit_only:
                return
            reports, bill = collect(client, batch_id, chosen.poll_s)
        else:
            reports, bill = review_live(client, walk, chosen)
    print(json.dumps({"files": reports, "bill": bill.as_json()}, indent=2, ensure_ascii=False))
    print("\n".join(bill.lines()), file=sys.stderr)


if __name__ == "__main__":
    main()
