"""``embergate tokens``"""

from __future__ import annotations

import sys

import click

from billing.accounts import ALL_PERMISSIONS, PERMISSIONS, AccountDirectory, ApiToken
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import show_instant
from embergate.config_file import Settings
from embergate.terminal import print_json, print_table, say


@click.group()
def tokens() -> None:
    """Create, list, revoke and import API tokens. Only their hashes are stored."""


@tokens.command()
@click.option("--account", "account_id", required=True, metavar="ID", help="Whose token it is.")
@click.option("--name", default="token", show_default=True, help="What it is for.")
@click.option("--operator", "is_operator", is_flag=True, help="Let it read the usage of every account.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def create(settings: Settings, account_id: str, name: str, is_operator: bool, as_json: bool) -> None:
    """Create an API token and print it, this once."""
    with open_store(settings) as store:
        permissions = ALL_PERMISSIONS if is_operator else PERMISSIONS
        token, secret = AccountDirectory(store).issue_token(account_id, name, permissions)
    if as_json:
        print_json({"id": token.id, "account_id": account_id, "name": name, "token": secret})
    else:
        click.echo(secret)
        say(f"This is token {token.id}; it is not stored and cannot be shown again.")


@tokens.command(name="list")
@click.option("--account", "account_id", metavar="ID", help="Only this account's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def list_tokens(settings: Settings, account_id: str | None, as_json: bool) -> None:
    """List API tokens; never the tokens themselves."""
    with open_store(settings) as store:
        found = AccountDirectory(store).list_tokens(account_id)
    if as_json:
        print_json(found)
        return
    print_table(("token id", "account id", "name", "created", "revoked"), [_row(token) for token in found])


@tokens.command()
@click.argument("token_id")
@with_settings
def revoke(settings: Settings, token_id: str) -> None:
    """Revoke the API token TOKEN_ID; the gateway refuses it within seconds."""
    with open_store(settings) as store:
        token = AccountDirectory(store).revoke_token(token_id)
    say(f"Token {token.id} ({token.name}) is revoked.")


@tokens.command(name="import")
@click.option("--account", "account_id", required=True, metavar="ID", help="Whose token it is.")
@click.option("--name", default="imported", show_default=True, help="What it is for.")
@with_settings
def import_token(settings: Settings, account_id: str, name: str) -> None:
    """Make an existing token valid here. It is read from standard input, so that no other process sees it."""
    secret = click.prompt("API token", hide_input=True, err=True) if _is_terminal() else _first_line()
    with open_store(settings) as store:
        token = AccountDirectory(store).import_token(account_id, secret, name)
    say(f"Imported as token {token.id}.")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _first_line() -> str:
    return sys.stdin.readline().strip()


def _row(token: ApiToken) -> tuple[str, ...]:
    revoked = show_instant(token.revoked_at_us) if token.revoked_at_us is not None else ""
    return (token.id, token.account_id, token.name, show_instant(token.created_at_us), revoked)
