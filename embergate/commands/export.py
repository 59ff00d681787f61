"""``embergate export``"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click
import msgspec

from billing.export import EventPosition, ExportedCharge, TokenEvent, Width, charges, events
from billing.export_focus import write_csv, write_parquet
from billing.periods import Period
from billing.store import Store
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import Instant, now_us
from embergate.config_file import Settings
from embergate.event_push import PushConfig, push_events
from embergate.refusal import Refusal
from embergate.terminal import say


@click.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["focus-csv", "focus-parquet", "cloudevents"]),
    default="focus-csv",
    show_default=True,
    help="FOCUS rows, or one event for each token class of a request.",
)
@click.option("--output", type=click.Path(dir_okay=False), help="Write to this file [standard output].")
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option("--since", type=Instant(), help="Only requests from then on: 2026-11-30, or 24h.")
@click.option("--until", type=Instant(), help="Only requests before then.")
@click.option(
    "--period",
    "width",
    type=click.Choice(["day", "hour"]),
    default="day",
    show_default=True,
    help="How long a charge period of a FOCUS row is.",
)
@click.option(
    "--push", "url", metavar="URL", help="Post new events to a collector such as OpenMeter instead."
)
@click.option(
    "--token-variable",
    default="EMBERGATE_EVENTS_TOKEN",
    show_default=True,
    help="The environment variable with the collector's token.",
)
@with_settings
def export(
    settings: Settings,
    form: str,
    output: str | None,
    account_id: str | None,
    since: int | None,
    until: int | None,
    width: Width,
    url: str | None,
    token_variable: str,
) -> None:
    """Write charged usage for other programs: FOCUS rows or CloudEvents, with ids that stay the same."""
    with open_store(settings) as store:
        if url is not None:
            _push(settings, store, url, os.environ.get(token_variable, ""))
            return
        period = Period(since, until)
        with _opened(output) as out, store.reading() as connection:
            if form == "cloudevents":
                num = _write_events(out, events(connection, period=period, account_id=account_id))
            else:
                rows = charges(connection, period, account_id=account_id, width=width)
                currency = settings.config.billing.currency
                num = _write_rows(form, rows, out, currency)
    if output is not None:
        say(f"Wrote {num:,} {'events' if form == 'cloudevents' else 'rows'} to {output}.")


def _write_rows(form: str, rows: Iterator[ExportedCharge], out: IO[bytes], currency: str) -> int:
    if form == "focus-parquet":
        if out.isatty():
            raise Refusal("Parquet is nothing for a terminal: name a file with --output.")
        return write_parquet(rows, out, currency)
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    try:
        return write_csv(rows, text, currency)
    finally:
        text.detach()


def _write_events(out: IO[bytes], found: Iterator[tuple[EventPosition, list[TokenEvent]]]) -> int:
    num = 0
    for _, group in found:
        for event in group:
            out.write(msgspec.json.encode(event) + b"\n")
            num += 1
    return num


def _push(settings: Settings, store: Store, url: str, token: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise Refusal(f"{url!r} is no address to post to: it begins with neither http:// nor https://")
    cursor = settings.data_dir / "exports" / "events.json"
    config = PushConfig(url=url, token=token, cursor_path=cursor)
    num = asyncio.run(push_events(store, config, now_us))
    say(f"Pushed {num:,} events to {url}.")


@contextlib.contextmanager
def _opened(output: str | None) -> Iterator[IO[bytes]]:
    """The file, which appears only when it is complete; or standard output."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(output)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as out:
            yield out
        unfinished.replace(path)
    except OSError as error:
        raise Refusal(f"cannot write {output}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
