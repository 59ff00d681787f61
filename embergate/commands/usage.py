"""``embergate usage``"""

from __future__ import annotations

import click

from billing.accounts import AccountDirectory
from billing.money import format_nanos, places_of
from billing.periods import Period
from billing.reports import GroupBy, UsageRow, UsageSummary, usage_summary
from embergate.commands.books import num_unposted, open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import Instant
from embergate.config_file import Settings
from embergate.refusal import Refusal
from embergate.terminal import print_json, print_table, say

_COLUMNS = ("requests", "prompt", "cached", "share", "completion", "cost", "without cache", "neurons")


@click.command()
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option("--since", type=Instant(), help="Only requests from then on: 2026-11-30, or 24h.")
@click.option(
    "--by",
    type=click.Choice(["model", "session", "day", "account", "request"]),
    default="model",
    show_default=True,
    help="What a row is.",
)
@click.option("--until", type=Instant(), help="Only requests before then.")
@click.option(
    "--limit",
    "max_rows",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Rows at most: the latest requests and days, the dearest of others.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def usage(
    settings: Settings,
    account_id: str | None,
    since: int | None,
    until: int | None,
    by: GroupBy,
    max_rows: int,
    as_json: bool,
) -> None:
    """Show what was used, and what it costs with and without the prefix cache."""
    with open_store(settings) as store:
        if account_id is not None and AccountDirectory(store).find_account(account_id) is None:
            raise Refusal(f"there is no account {account_id!r}")
        summary = usage_summary(
            store,
            by=by,
            account_id=account_id,
            period=Period(start_us=since, end_us=until),
            max_rows=max_rows,
            currency=settings.config.billing.currency,
        )
        num_waiting = num_unposted(settings, store)
    if as_json:
        print_json(summary)
    else:
        _print(summary, by)
    if num_waiting:
        say(
            f"{num_waiting:,} usage records wait in the journal and are not counted yet; "
            "a running gateway posts them within seconds."
        )


def _print(summary: UsageSummary, by: GroupBy) -> None:
    shown = [(row.key or "(none)", row) for row in summary.rows]
    if len(shown) > 1:
        shown.append(("total", summary.total))
    num_places = places_of(row.amount_nanos for _, row in shown)
    num_places = max(num_places, places_of(row.undiscounted_nanos for _, row in shown))
    rows = [_row(row, key, summary.currency, num_places) for key, row in shown]
    print_table((by, *_COLUMNS), rows, numeric=_COLUMNS)
    if summary.is_truncated:
        say("There are more rows: raise --limit, or narrow them with --since, --until, --account.")


def _row(row: UsageRow, key: str, currency: str, num_places: int) -> tuple[str, ...]:
    return (
        key,
        f"{row.num_requests:,}",
        f"{row.prompt_tokens:,}",
        f"{row.cached_prompt_tokens:,}",
        f"{row.cached_share:.1%}",
        f"{row.completion_tokens:,}",
        f"{format_nanos(row.amount_nanos, num_places)} {currency}",
        f"{format_nanos(row.undiscounted_nanos, num_places)} {currency}",
        f"{row.neurons:,.4f}",
    )
