"""``embergate batches``"""

from __future__ import annotations

from typing import Any

import click

from billing.money import format_nanos
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import show_instant
from embergate.config_file import Settings
from embergate.refusal import Refusal
from embergate.terminal import print_json, print_table, say
from gateway.batches.archive import BatchArchive
from gateway.batches.closing import BatchCloser
from gateway.batches.jobs import Batch, ItemCounts
from gateway.batches.openai import batch_object


@click.group()
def batches() -> None:
    """Look at asynchronous batches, and cancel them."""


@batches.command(name="list")
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Batches at most, newest first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def list_batches(settings: Settings, account_id: str | None, limit: int, as_json: bool) -> None:
    """List batches, newest first."""
    with open_store(settings) as store:
        archive = BatchArchive(store)
        found = archive.newest(account_id, max_batches=limit)
        counts = archive.counts([batch.id for batch in found])
        if as_json:
            print_json([_shown(archive, batch, counts[batch.id]) for batch in found])
            return
    columns = ("batch id", "account id", "model", "created", "status", "items", "succeeded", "failed")
    rows = [_row(batch, counts[batch.id]) for batch in found]
    print_table(columns, rows, numeric=("items", "succeeded", "failed"))


@batches.command()
@click.argument("batch_id")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def show(settings: Settings, batch_id: str, as_json: bool) -> None:
    """Show the batch BATCH_ID: how far it is, what it used, what it cost."""
    with open_store(settings) as store:
        archive = BatchArchive(store)
        batch = _find(archive, batch_id)
        shown = _shown(archive, batch, archive.counts([batch_id])[batch_id])
        events = archive.events(batch_id)
    if as_json:
        print_json(shown)
        return
    currency = settings.config.billing.currency
    counts, usage = shown["request_counts"], shown["usage"]
    rows = [
        ("account", batch.account_id),
        ("model", batch.model),
        ("endpoint", batch.endpoint),
        ("status", shown["status"]),
        ("items", f"{counts['total']}, {counts['completed']} succeeded, {counts['failed']} did not"),
        ("tokens in", f"{usage['input_tokens']:,}"),
        ("of them cached", f"{usage['input_tokens_details']['cached_tokens']:,}"),
        ("tokens out", f"{usage['output_tokens']:,}"),
        ("cost", f"{format_nanos(shown['amount_nanos'])} {currency}"),
        ("expires", show_instant(batch.expires_at_us)),
        *((event.type.rpartition(".")[2], show_instant(event.at_us)) for event in events),
    ]
    print_table(("batch", batch.id), rows)


@batches.command()
@click.argument("batch_id")
@with_settings
def cancel(settings: Settings, batch_id: str) -> None:
    """Run no more items of the batch BATCH_ID; those that run now end and count."""
    with open_store(settings) as store:
        archive = BatchArchive(store)
        batch = _find(archive, batch_id)
        if not BatchCloser(store, settings.config.gateway.batches).cancel(batch.account_id, batch_id):
            raise Refusal(f"batch {batch_id} is {batch.status}")
        counts = archive.counts([batch_id])[batch_id]
    say(f"{counts.cancelled} items are cancelled; {counts.leased} run to their end.")


def _find(archive: BatchArchive, batch_id: str) -> Batch:
    batch = archive.find(None, batch_id)
    if batch is None:
        raise Refusal(f"there is no batch {batch_id!r}")
    return batch


def _shown(archive: BatchArchive, batch: Batch, counts: ItemCounts) -> dict[str, Any]:
    shown = batch_object(batch, counts, archive.usage(batch.id))
    return shown | {"account_id": batch.account_id, "amount_nanos": archive.amount_nanos(batch.id)}


def _row(batch: Batch, counts: ItemCounts) -> tuple[str, ...]:
    num_failed = counts.failed + counts.expired + counts.cancelled
    return (
        batch.id,
        batch.account_id,
        batch.model,
        show_instant(batch.created_at_us),
        batch.status,
        str(batch.num_items),
        str(counts.succeeded),
        str(num_failed),
    )
