"""``embergate accounts``"""

from __future__ import annotations

import click

from billing.accounts import Account, AccountDirectory
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import show_instant
from embergate.config_file import Settings
from embergate.terminal import print_json, print_table


@click.group()
def accounts() -> None:
    """Create and list accounts."""


@accounts.command()
@click.argument("name")
@click.option("--id", "account_id", metavar="HEX32", help="The account's id [drawn at random].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def create(settings: Settings, name: str, account_id: str | None, as_json: bool) -> None:
    """Create an account called NAME."""
    with open_store(settings) as store:
        account = AccountDirectory(store).create_account(name, account_id)
    _print([account], as_json)


@accounts.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def list_accounts(settings: Settings, as_json: bool) -> None:
    """List all accounts."""
    with open_store(settings) as store:
        found = AccountDirectory(store).list_accounts()
    _print(found, as_json)


def _print(found: list[Account], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [(account.id, account.name, show_instant(account.created_at_us)) for account in found]
    print_table(("account id", "name", "created"), rows)
