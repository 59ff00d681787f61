"""``embergate budgets``"""

from __future__ import annotations

import click

from billing.budgets import ACTIONS, PERIODS, BudgetAction, BudgetBook, BudgetPeriod, BudgetState
from billing.money import format_nanos
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.credit import Amount
from embergate.commands.instants import Instant, show_instant
from embergate.config_file import Settings
from embergate.terminal import print_json, print_table, say


@click.group()
def budgets() -> None:
    """Limit what accounts and API tokens may spend."""


@budgets.command(name="set")
@click.option("--account", "account_id", required=True, metavar="ID", help="Whose budget it is.")
@click.option("--token", "token_id", default="", metavar="ID", help="Of one API token only.")
@click.option("--period", required=True, type=click.Choice(PERIODS), help="The window, UTC.")
@click.option("--limit", type=Amount(), default="0", metavar="25.00", help="How much [0].")
@click.option(
    "--action", type=click.Choice(ACTIONS), default="hard", show_default=True, help="Refuse, or only warn."
)
@click.option("--since", type=Instant(), metavar="WHEN", help="Where a total begins to count [now].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def set_budget(
    settings: Settings,
    account_id: str,
    token_id: str,
    period: BudgetPeriod,
    limit: int,
    action: BudgetAction,
    since: int | None,
    as_json: bool,
) -> None:
    """Set the budget of a period, or change it.

    With the period "credit" an account may spend what it has paid ahead, and LIMIT on top of that.
    """
    with open_store(settings) as store:
        book = BudgetBook(store)
        budget = book.set_budget(account_id, period, limit, token_id=token_id, action=action, since_us=since)
        states = [state for state in book.states(account_id) if state.budget.id == budget.id]
    _print(states, settings, as_json)


@budgets.command(name="list")
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def list_budgets(settings: Settings, account_id: str | None, as_json: bool) -> None:
    """List budgets, and how far each is spent."""
    with open_store(settings) as store:
        states = BudgetBook(store).states(account_id)
    _print(states, settings, as_json)


@budgets.command()
@click.argument("budget_id", metavar="ID")
@with_settings
def remove(settings: Settings, budget_id: str) -> None:
    """Lift a limit."""
    with open_store(settings) as store:
        budget = BudgetBook(store).remove(budget_id)
    say(f"The {budget.period} budget of account {budget.account_id} is lifted.")


def _print(states: list[BudgetState], settings: Settings, as_json: bool) -> None:
    if as_json:
        print_json(states)
        return
    currency = settings.config.billing.currency
    rows = [
        (
            state.budget.id,
            state.budget.account_id,
            state.budget.token_id or "-",
            state.budget.period,
            state.budget.action,
            f"{format_nanos(state.limit_nanos)} {currency}",
            f"{format_nanos(state.charged_nanos)} {currency}",
            f"{format_nanos(state.left_nanos)} {currency}",
            "-" if state.window.end_us is None else show_instant(state.window.end_us),
        )
        for state in states
    ]
    titles = ("budget id", "account id", "token", "period", "action", "limit", "charged", "left", "renewed")
    print_table(titles, rows, ("limit", "charged", "left"))
