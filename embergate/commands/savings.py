"""``embergate savings``"""

from __future__ import annotations

import click

from billing.accounts import AccountDirectory
from billing.analytics import UsageFilter
from billing.money import format_nanos
from billing.periods import Period
from billing.savings import Savings, price_lists
from billing.savings import savings as compare
from billing.savings_example import ASSUMPTIONS, published_case
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import Instant
from embergate.config_file import Settings
from embergate.refusal import Refusal
from embergate.terminal import console, print_json, print_table, say

_COLUMNS = ("instead on", "input", "cached", "output", "cost", "without a cache", "saved here")


@click.command()
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option("--since", type=Instant(), help="Only requests from then on: 2026-11-30, or 24h.")
@click.option("--until", type=Instant(), help="Only requests before then.")
@click.option("--model", metavar="ID", help="Only this model's.")
@click.option("--example", "is_example", is_flag=True, help="Work out a published case instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def savings(
    settings: Settings,
    account_id: str | None,
    since: int | None,
    until: int | None,
    model: str | None,
    is_example: bool,
    as_json: bool,
) -> None:
    """Show what caching saved, and what the same usage costs on other price lists."""
    found = published_case() if is_example else _recorded(settings, account_id, Period(since, until), model)
    if as_json:
        print_json(found)
        return
    if is_example:
        say("A published case, a year of it. Assumed:")
        for line in ASSUMPTIONS:
            say(f"  - {line}")
    _print(found)


def _recorded(settings: Settings, account_id: str | None, period: Period, model: str | None) -> Savings:
    billing = settings.config.billing
    wanted = UsageFilter(account_id=account_id, period=period, models=() if model is None else (model,))
    with open_store(settings) as store:
        if account_id is not None and AccountDirectory(store).find_account(account_id) is None:
            raise Refusal(f"there is no account {account_id!r}")
        lists = price_lists(billing)
        with store.reading() as connection:
            return compare(connection, wanted, lists, currency=billing.currency)


def _print(found: Savings) -> None:
    out = console()
    tokens, currency = found.tokens, found.currency
    out.print(
        f"\n{tokens.num_input:,} input tokens, {tokens.num_cached:,} cached ({found.cached_share:.1%} of the "
        f"prompts), {tokens.num_output:,} output"
    )
    out.print(f"cost                      {_rounded(found.amount_nanos)} {currency}")
    out.print(f"without the cache discount {_rounded(found.undiscounted_nanos)} {currency}")
    out.print(f"saved by caching          {_rounded(found.saved_nanos)} {currency} ({found.saved_share:.1%})")
    out.print(
        f"without caching at all     {found.num_recomputed:,} more prompt tokens to compute "
        f"({found.computed_factor:.1f} times as many)\n"
    )
    rows = [
        (
            each.name,
            each.input,
            each.cached_input,
            each.output,
            f"{_rounded(each.amount_nanos)} {currency}",
            f"{_rounded(each.uncached_nanos)} {currency}",
            f"{_rounded(each.saved_nanos)} {currency} ({each.saved_share:.1%})",
        )
        for each in found.comparisons
    ]
    print_table(_COLUMNS, rows, numeric=_COLUMNS[1:])
    for each in found.comparisons:
        say(f"{each.name}: {each.source}, {each.as_of}")


def _rounded(nanos: int) -> str:
    """To cents from a dollar on, exact below."""
    if abs(nanos) < 1_000_000_000:
        return format_nanos(nanos)
    return f"{nanos / 1e9:,.2f}"
