"""``embergate statement``"""

from __future__ import annotations

import click

from billing.money import format_nanos, places_of
from billing.periods import month_text
from billing.statement import Statement, UnknownAccountError, monthly_statement
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import now_us, show_instant
from embergate.config_file import Settings
from embergate.dev_account import read_dev_env
from embergate.layout import DataLayout
from embergate.refusal import Refusal
from embergate.terminal import console, print_json, print_table


@click.command()
@click.option("--account", "account_id", metavar="ID", help="Whose bill [the development account's].")
@click.option("--month", metavar="YYYY-MM", help="Which month, UTC [this one].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def statement(settings: Settings, account_id: str | None, month: str | None, as_json: bool) -> None:
    """Show an account's bill for a month, line by line."""
    account_id = account_id or _development_account(settings)
    try:
        with open_store(settings) as store:
            bill = monthly_statement(
                store, account_id, month or month_text(now_us()), currency=settings.config.billing.currency
            )
    except (UnknownAccountError, ValueError) as error:
        raise Refusal(str(error)) from error
    if as_json:
        print_json(bill)
        return
    _print(bill)


def _development_account(settings: Settings) -> str:
    account = read_dev_env(DataLayout(settings.data_dir).dev_env)
    if account is None:
        raise Refusal("there is no development account yet: name one with --account.")
    return account.account_id


def _print(bill: Statement) -> None:
    out = console()
    out.print(f"[bold]{bill.month}[/]  {bill.account_name}  {bill.account_id}\n")
    if bill.as_of is not None:
        out.print(f"provisional, as of {bill.as_of[:19]}Z: the month is not over\n")
    num_places = places_of(line.amount_nanos for line in bill.lines)
    rows = [
        (
            line.model,
            line.token_class,
            f"{line.num_tokens:,}",
            line.rate,
            f"{format_nanos(line.amount_nanos, num_places)} {bill.currency}",
        )
        for line in bill.lines
    ]
    print_table(
        ("model", "tokens of", "count", "per million", "amount"), rows, ("count", "per million", "amount")
    )
    currency = bill.currency
    out.print(
        f"\ntotal {bill.amount} {currency}, {bill.num_requests:,} requests, {bill.neurons:,.4f} neurons"
    )
    out.print(f"without the prefix cache {bill.undiscounted} {currency}: {bill.discount} {currency} saved")
    if bill.free_nanos:
        out.print(f"the free allocation covered {format_nanos(bill.free_nanos)} {currency}")
    if bill.credits or bill.opening_balance_nanos:
        _print_balance(bill)
    for count, what in (
        (bill.num_not_charged, "failed through no fault of the account and are not charged"),
        (bill.num_unpriced, "had no rate card in force"),
        (bill.num_estimated, "have estimated counts"),
    ):
        if count:
            out.print(f"{count:,} requests {what}")


def _print_balance(bill: Statement) -> None:
    moved = [
        (show_instant(credit.occurred_at_us)[:10], credit.reason, credit.amount_nanos)
        for credit in bill.credits
    ]
    lines = [
        (bill.since[:10], "balance before", bill.opening_balance_nanos),
        *moved,
        ("", f"charges of {bill.month}", -bill.amount_nanos),
        (
            (bill.as_of or bill.until)[:10],
            "balance so far" if bill.as_of else "balance after",
            bill.closing_balance_nanos,
        ),
    ]
    num_places = places_of(nanos for _, _, nanos in lines)
    rows = [(day, what, f"{format_nanos(nanos, num_places)} {bill.currency}") for day, what, nanos in lines]
    console().print()
    print_table(("day", "prepaid credit", "amount"), rows, ("amount",))
