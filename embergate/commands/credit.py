"""``embergate credit``"""

from __future__ import annotations

from typing import Any

import click

from billing.credits import Credit, CreditBook
from billing.money import NANOS_PER_MICRO, format_nanos, parse_micros
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import show_instant
from embergate.config_file import Settings
from embergate.terminal import print_json, print_table


class Amount(click.ParamType[int]):
    """A plain decimal number of dollars (or whatever the currency is), as nano-dollars."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_micros(str(value)) * NANOS_PER_MICRO
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group()
def credit() -> None:
    """Book prepaid credit and credit notes. Nothing that is booked is ever changed."""


@credit.command()
@click.option("--account", "account_id", required=True, metavar="ID", help="Whose credit it is.")
@click.option("--amount", required=True, type=Amount(), metavar="25.00", help="How much was paid.")
@click.option("--reason", default="Prepaid credit", show_default=True, help="What the statement says.")
@click.option("--reference", metavar="TEXT", help="Such as the payment's id; one books once [drawn].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def add(
    settings: Settings, account_id: str, amount: int, reason: str, reference: str | None, as_json: bool
) -> None:
    """Book credit that an account has paid for."""
    with open_store(settings) as store:
        booked = CreditBook(store).top_up(account_id, amount, reason, reference)
    _print([booked], settings, as_json)


@credit.command()
@click.option("--account", "account_id", required=True, metavar="ID", help="To whom it is given.")
@click.option("--request", "request_id", default="", metavar="ID", help="The request that it corrects.")
@click.option("--amount", type=Amount(), metavar="0.35", help="How much [all that the request was charged].")
@click.option("--reason", required=True, help="What the statement says.")
@click.option("--reference", metavar="TEXT", help="Such as a case number; one books once [drawn].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def note(
    settings: Settings,
    account_id: str,
    request_id: str,
    amount: int | None,
    reason: str,
    reference: str | None,
    as_json: bool,
) -> None:
    """Give back what should not have been charged, as a transaction of its own."""
    with open_store(settings) as store:
        booked = CreditBook(store).note(
            account_id, reason, amount_nanos=amount, request_id=request_id, reference=reference
        )
    _print([booked], settings, as_json)


@credit.command(name="list")
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def list_credits(settings: Settings, account_id: str | None, as_json: bool) -> None:
    """List top-ups and credit notes."""
    with open_store(settings) as store:
        found = CreditBook(store).list_credits(account_id)
    _print(found, settings, as_json)


def _print(found: list[Credit], settings: Settings, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    currency = settings.config.billing.currency
    rows = [
        (
            show_instant(one.occurred_at_us),
            one.account_id,
            one.kind,
            f"{format_nanos(one.amount_nanos)} {currency}",
            one.request_id or "-",
            one.reason,
        )
        for one in found
    ]
    print_table(("booked", "account id", "kind", "amount", "request", "reason"), rows, ("amount",))
