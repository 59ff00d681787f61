"""``python -m loadtest bill-check``: what a client counts is what it is billed for, request by request.

Requests of all kinds are sent: streamed and whole, short and long, continued and new; some clients leave in
the middle. Of whole answers the client knows every figure from the API's usage and the bill must say the
same. Of an answer that was left it knows the prompt, which others had whole, and how much came: the bill may
not be for less, nor for more than was asked.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest.exchange import Endpoint, Exchange, ask
from loadtest.options import endpoint_options
from loadtest.replay.words import WORDS
from loadtest.usage_api import billed_rows, billed_total

_NUM_TEXTS = 24
_TURNS = 4


@dataclass(frozen=True)
class Question:
    """One request of the run."""

    text: int
    session: str
    max_tokens: int
    is_streamed: bool
    leave_after: int | None


@dataclass
class Verdict:
    """What was compared. ``problems`` is empty when every figure agrees."""

    num_requests: int = 0
    num_whole: int = 0
    num_left: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    billed: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@click.command("bill-check")
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--disconnects", type=click.FloatRange(0, 0.9), default=0.15, show_default=True,
              help="Share of the streams that are left.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=4), default=12, show_default=True, help="Of an answer.")
@click.option("--timeout", "timeout_s", type=float, default=120.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="JSON too.")
@endpoint_options
@click.pass_context
def bill_check(
    context: click.Context,
    endpoint: Endpoint,
    num_requests: int,
    disconnects: float,
    concurrency: int,
    max_tokens: int,
    timeout_s: float,
    seed: int,
    out: Path | None,
) -> None:
    """Compare what clients count with what they are billed for; the exit code is 1 on any difference."""
    questions = questions_of(num_requests, disconnects, max_tokens, seed)
    verdict = asyncio.run(_check(endpoint, questions, concurrency, timeout_s))
    _print(verdict)
    if out is not None:
        out.write_text(json.dumps(vars(verdict), indent=2) + "\n")
    context.exit(1 if verdict.problems else 0)


def questions_of(num_requests: int, disconnects: float, max_tokens: int, seed: int) -> list[Question]:
    """A mixture; sessions are new in every run, so that the bill of one run can be told from others'."""
    rng = random.Random(seed)
    run = f"bill-{time.time_ns():x}"
    found = []
    for number in range(num_requests):
        is_streamed = rng.random() < 0.7
        leaves = is_streamed and rng.random() < disconnects
        found.append(
            Question(
                text=rng.randrange(_NUM_TEXTS),
                session=f"{run}-{number // _TURNS}",
                max_tokens=max_tokens if leaves else rng.randint(1, max_tokens),
                is_streamed=is_streamed,
                leave_after=rng.randint(1, max(1, max_tokens // 3)) if leaves else None,
            )
        )
    return found


def text_of(number: int) -> str:
    """One of the run's texts: a shared beginning, then words of its own."""
    rng = random.Random(number)
    shared = " ".join(WORDS[:40])
    return f"{shared} {' '.join(rng.choices(WORDS, k=4 + 6 * number))}"


async def _check(
    endpoint: Endpoint, questions: Sequence[Question], concurrency: int, timeout_s: float
) -> Verdict:
    places = asyncio.Semaphore(concurrency)
    async with endpoint.session(concurrency, timeout_s) as session:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("Asking", total=len(questions))

            async def one(question: Question) -> Exchange:
                async with places:
                    exchange = await ask(session, endpoint, _body(question), question.session,
                                         question.leave_after)  # fmt: skip
                bar.advance(task)
                return exchange

            exchanges = await asyncio.gather(*map(one, questions))
        sessions = sorted({question.session for question in questions})
        wanted = {exchange.request_id for exchange in exchanges if exchange.status == 200}
        rows = await billed_rows(session, endpoint, sessions, lambda rows: wanted <= rows.keys())
        total = await billed_total(session, endpoint, sessions, ("num_requests", *_FIGURES.values()))
    return compare(questions, exchanges, rows, total)


def _body(question: Question) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text_of(question.text)}],
        "max_tokens": question.max_tokens,
        "stream": question.is_streamed,
        "temperature": 0,
        "ignore_eos": True,
    }


_FIGURES = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_prompt_tokens",
    "completion_tokens": "completion_tokens",
}
"""A figure of an exchange -> its name in the usage API."""


def compare(
    questions: Sequence[Question],
    exchanges: Sequence[Exchange],
    rows: Mapping[str, Mapping[str, Any]],
    total: Mapping[str, int],
) -> Verdict:
    """Hold the client's figures against the bill's."""
    verdict = Verdict(num_requests=len(questions), billed=dict(total))
    prompt_tokens = {
        question.text: exchange.prompt_tokens
        for question, exchange in zip(questions, exchanges, strict=True)
        if exchange.is_whole
    }
    for question, exchange in zip(questions, exchanges, strict=True):
        problem = _problem(question, exchange, rows.get(exchange.request_id), prompt_tokens)
        if problem:
            verdict.problems.append(f"{exchange.request_id or question.session}: {problem}")
        verdict.num_left += exchange.has_left
        if exchange.is_whole:
            verdict.num_whole += 1
            for name in _FIGURES:
                setattr(verdict, name, getattr(verdict, name) + getattr(exchange, name))
    known = {exchange.request_id for exchange in exchanges}
    verdict.problems += [
        f"{request_id}: billed, and never sent" for request_id in rows if request_id not in known
    ]
    sums = {name: sum(int(row[name]) for row in rows.values()) for name in _FIGURES.values()}
    sums["num_requests"] = len(rows)
    verdict.problems += [
        f"the usage API sums up {total[name]} {name}, its single requests have {value}"
        for name, value in sums.items()
        if total[name] != value
    ]
    return verdict


def _problem(
    question: Question,
    exchange: Exchange,
    row: Mapping[str, Any] | None,
    prompt_tokens: Mapping[int, int],
) -> str:
    if exchange.error:
        return f"failed: {exchange.error}"
    if row is None:
        return "served, and not billed"
    if exchange.is_whole:
        differing = [
            f"{name} {getattr(exchange, name)} against {row[billed]} billed"
            for name, billed in _FIGURES.items()
            if getattr(exchange, name) != row[billed]
        ]
        return ", ".join(differing)
    known = prompt_tokens.get(question.text)
    if known is not None and known != row["prompt_tokens"]:
        return f"left: {row['prompt_tokens']} prompt tokens billed, the same prompt has {known}"
    if not exchange.num_pieces <= row["completion_tokens"] <= question.max_tokens:
        return (
            f"left after {exchange.num_pieces} pieces of at most {question.max_tokens} tokens, "
            f"billed for {row['completion_tokens']}"
        )
    return ""


def _print(verdict: Verdict) -> None:
    console = Console()
    table = Table(
        "", "counted by the client", "billed, left ones included", title="Bill check", title_justify="left"
    )
    billed = verdict.billed
    table.add_row(
        "requests", f"{verdict.num_whole:,} whole, {verdict.num_left:,} left", f"{billed['num_requests']:,}"
    )
    for name, theirs in _FIGURES.items():
        table.add_row(name.replace("_", " "), f"{getattr(verdict, name):,}", f"{billed[theirs]:,}")
    console.print(table)
    for problem in verdict.problems[:20]:
        console.print(f"  {problem}", markup=False)
    console.print(f"{len(verdict.problems):,} differences in {verdict.num_requests:,} requests")
