"""``embergate trace``: recorded usage as a trace that can be played again."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from sqlalchemy import Connection, select

from billing.periods import Period
from billing.reports import in_period
from billing.schema import usage_records
from billing.usage import UsageRecord
from billing.usage_trace import DEFAULT_BLOCK_TOKENS, TraceRecorder
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import Instant
from embergate.config_file import Settings
from embergate.refusal import Refusal
from embergate.terminal import say

_BATCH = 1000


@click.group()
def trace() -> None:
    """Record usage as a trace that can be replayed and simulated."""


@trace.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE")
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option("--since", type=Instant(), help="Only requests from then on: 2026-11-30, or 24h.")
@click.option("--until", type=Instant(), help="Only requests before then.")
@click.option("--block-tokens", type=click.IntRange(min=1),
              help="What an id stands for [a block of the replicas' cache].")  # fmt: skip
@with_settings
def record(
    settings: Settings,
    out: Path,
    account_id: str | None,
    since: int | None,
    until: int | None,
    block_tokens: int | None,
) -> None:
    """Write requests as a trace in Mooncake's format: times, lengths and what was shared, nobody's id."""
    conditions = in_period(Period(start_us=since, end_us=until), account_id)
    query = select(usage_records).where(*conditions).order_by(usage_records.c.started_at_us)
    with open_store(settings) as store, store.reading() as connection:
        size = block_tokens or _block_tokens(connection)
        recorder, num_lines = TraceRecorder(size), 0
        rows = connection.execution_options(yield_per=_BATCH).execute(query).mappings()
        with out.open("wb") as file:
            for line in recorder.lines(UsageRecord(**row) for row in rows):
                file.write(msgspec.json.encode(line) + b"\n")
                num_lines += 1
    if not num_lines:
        raise Refusal("there is no request to record; a running gateway posts its records within seconds")
    say(
        f"Wrote {num_lines:,} requests in blocks of {size} to {out}: "
        f"{recorder.cached_tokens / recorder.prompt_tokens:.1%} of the prompt tokens were cached, "
        f"{recorder.shared_tokens / recorder.prompt_tokens:.1%} are shared in the trace "
        "(blocks of answers are not)."
    )
    say(f'Replay it with `make replay REPLAY_ARGS="--trace {out} --block-tokens {size} --length 1"`.')


def _block_tokens(connection: Connection) -> int:
    """Tokens of a block of the cache, from a record that says both."""
    columns = usage_records.c
    found = connection.execute(
        select(columns.cached_prompt_tokens, columns.num_cached_blocks)
        .where(columns.num_cached_blocks > 0)
        .limit(1)
    ).first()
    return found[0] // found[1] if found else DEFAULT_BLOCK_TOKENS
