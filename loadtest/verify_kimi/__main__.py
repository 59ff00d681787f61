"""``python -m loadtest.verify_kimi``, or ``make verify-kimi``. Exit code 0: every asserted row is met."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.verify_kimi.asking import Endpoint
from loadtest.verify_kimi.cases import load_schemas, load_trigger_cases, own_trigger_cases
from loadtest.verify_kimi.own_server import StartError, Target, tiny_gateway
from loadtest.verify_kimi.probes import Asks, Bars, Probe, build_probes, row_kinds
from loadtest.verify_kimi.scorecard import Scorecard

Item = TypeVar("Item")

_WIDE_COLUMNS = 140
_VENDOR_SCHEMAS = Path("../shared/data/tool-schemas")
_RANDOM = (
    "The weights are random: what the model decides means nothing, so rows about its decisions are not "
    "asserted. Point --url, --token and --model at real weights for those."
)


@click.command()
@click.option(
    "--url", default="", help="Base of an OpenAI-form API; without it the tiny Kimi is started here."
)
@click.option("--token", envvar="EMBERGATE_API_TOKEN", default="", help="API token for --url.")
@click.option(
    "--model", default="@cf/moonshotai/kimi-k2.5", show_default=True, help="Model to ask for at --url."
)
@click.option("--random-weights", is_flag=True, help="The model at --url has random weights too.")
@click.option(
    "--concurrency", type=click.IntRange(1, 512), default=8, show_default=True, help="Questions at once."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Schemas and labelled conversations to use, spread over all of them; 0 uses all.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=16),
    default=None,
    help="Budget of one answer [default: 2048, 96 for the tiny Kimi].",
)
@click.option(
    "--timeout-s", type=float, default=300.0, show_default=True, help="Longest time for one answer."
)
@click.option(
    "--schemas",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    help="Folder of JSON schemas, one a line [default: the vendor's beside the project, or a few own].",
)
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="Labelled conversations, one a line, in the vendor's form [default: own ones].",
)
@click.option(
    "--min-f1", type=click.FloatRange(0, 1), default=0.8, show_default=True, help="Least trigger F1."
)
@click.option(
    "--min-arguments",
    type=click.FloatRange(0, 1),
    default=0.95,
    show_default=True,
    help="Least share of unforced calls whose arguments meet their schema.",
)
@click.option(
    "--min-same",
    type=click.FloatRange(0, 1),
    default=0.9,
    show_default=True,
    help="Least share of streams that say what the whole answer says.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the card as JSON."
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default="config.yaml",
    show_default=True,
    help="Configuration that the tiny Kimi is served from.",
)
def main(
    url: str, token: str, model: str, random_weights: bool, concurrency: int, limit: int,
    max_tokens: int | None, timeout_s: float, schemas: Path | None, labels: Path | None, min_f1: float,
    min_arguments: float, min_same: float, out: Path | None, config: Path,
) -> None:  # fmt: skip
    """Verify a served Kimi from outside: a scorecard of tool calls, JSON answers, streams and refusals."""
    console = Console()
    has_random_weights = random_weights or not url
    bars = Bars(trigger_f1=min_f1, free_arguments=min_arguments, same=min_same)
    if schemas is None and _VENDOR_SCHEMAS.is_dir():
        schemas = _VENDOR_SCHEMAS
    try:
        triggers = own_trigger_cases() if labels is None else load_trigger_cases(labels)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    probes = build_probes(
        spread(triggers, limit),
        spread(load_schemas(schemas), limit),
        max_tokens or (2048 if url else 96),
    )
    card = Scorecard(
        row_kinds(bars, has_random_weights=has_random_weights), has_random_weights=has_random_weights
    )
    with contextlib.ExitStack() as stack:
        if url:
            target = Target(url, token, model)
        else:
            console.print("Starting the tiny Kimi ...")
            try:
                target = stack.enter_context(tiny_gateway(config))
            except StartError as error:
                raise click.ClickException(f"the tiny Kimi did not start: {error}") from error
        asyncio.run(run(target, probes, card, concurrency, timeout_s, console))
    show(card, console, has_random_weights)
    if out is not None:
        out.write_text(json.dumps(card.as_json(), indent=2) + "\n")
    sys.exit(0 if card.is_passed else 1)


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most ``limit`` of the items, at equal distances; 0 is all."""
    if not limit or len(items) <= limit:
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


async def run(
    target: Target,
    probes: Sequence[Probe],
    card: Scorecard,
    concurrency: int,
    timeout_s: float,
    console: Console,
) -> None:
    """Ask everything, a bounded number of questions at once, with a progress bar."""
    headers = {"authorization": f"Bearer {target.token}"} if target.token else {}
    columns = (TextColumn("asking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("asking", total=len(probes))
        async with aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0), trust_env=True
        ) as session:
            server = Endpoint(session, target.url, target.model, timeout_s)
            await ask_all(server, probes, card, concurrency, lambda: progress.advance(bar))


async def ask_all(
    server: Asks, probes: Sequence[Probe], card: Scorecard, concurrency: int, on_done: Callable[[], object]
) -> None:
    """Run probes, ``concurrency`` at a time, and put their marks on the card."""
    waiting = iter(probes)

    async def work() -> None:
        for probe in waiting:
            for mark in await probe(server):
                card.add(mark)
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


def show(card: Scorecard, console: Console, has_random_weights: bool) -> None:
    """Print the card, and examples of what was bad."""
    console.print(card.table(is_wide=console.width >= _WIDE_COLUMNS))
    for row in card.rows():
        for example in row.examples:
            console.print(f"  {row.kind.name}: {example}", markup=False, highlight=False)
    if has_random_weights:
        console.print(_RANDOM)
    console.print("passed" if card.is_passed else "FAILED")


if __name__ == "__main__":
    main()
