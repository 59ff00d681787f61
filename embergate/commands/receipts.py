"""``embergate receipts``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from billing.receipt_keys import KeyRing, ReceiptKeyError, key_set, list_keys, read_key_set
from billing.receipts import BadReceiptError, Receipt, find_receipt, sign, verify
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.commands.instants import show_instant
from embergate.config_file import Settings
from embergate.layout import DataLayout
from embergate.receipt_prompts import check_prompt
from embergate.refusal import Refusal
from embergate.terminal import console, print_json, print_table, say
from gateway.auth import SaltMaker
from gateway.secret_files import CACHE_SALT_SECRET, load_or_create

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def receipts() -> None:
    """Show, sign and check receipts of single requests."""


@receipts.command()
@click.argument("request_id")
@click.option("--account", "account_id", required=True, metavar="ID", help="Whose request it was.")
@with_settings
def show(settings: Settings, request_id: str, account_id: str) -> None:
    """Print the signed receipt of a request, as the API gives it."""
    layout = DataLayout(settings.data_dir)
    salts = SaltMaker(load_or_create(layout.secrets_dir, CACHE_SALT_SECRET))
    with open_store(settings) as store:
        with store.reading() as connection:
            receipt = find_receipt(
                connection,
                account_id,
                request_id,
                cache_salt=salts.salt_for(account_id),
                currency=settings.config.billing.currency,
            )
        if receipt is None:
            raise Refusal(f"account {account_id} has no request {request_id!r} on the books.")
        print_json(sign(receipt, KeyRing(store, layout.secrets_dir).signing_key()))


@receipts.command(name="verify")
@click.argument("file", type=_FILE)
@click.option("--keys", "keys_file", type=_FILE, help="The public keys, a JSON Web Key Set [the store's].")
@click.option("--request", "request_file", type=_FILE, help="The request's body, as it was sent.")
@click.option("--tokenizer", type=_DIRECTORY, help="The model's tokenizer and chat template.")
@with_settings
@click.pass_context
def verify_receipt(
    context: click.Context,
    settings: Settings,
    file: Path,
    keys_file: Path | None,
    request_file: Path | None,
    tokenizer: Path | None,
) -> None:
    """Check a receipt: its signature, its arithmetic and, given the request, its counts.

    The exit code is 0 when all of it is right and 1 when not.
    """
    if (request_file is None) != (tokenizer is None):
        raise Refusal("--request and --tokenizer go together: the one is read with the other.")
    try:
        receipt, problems = verify(_read_json(file), _public_keys(settings, keys_file))
    except (BadReceiptError, ReceiptKeyError) as error:
        raise Refusal(str(error)) from error
    if request_file is not None and tokenizer is not None:
        problems += check_prompt(receipt, request_file.read_bytes(), tokenizer)
    _print(receipt, problems, is_derived=request_file is not None)
    context.exit(1 if problems else 0)


@receipts.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON Web Key Set.")
@with_settings
def keys(settings: Settings, as_json: bool) -> None:
    """List the public keys of all times."""
    with open_store(settings) as store, store.reading() as connection:
        found = list_keys(connection)
    if as_json:
        print_json(key_set(found))
        return
    print_table(("key id", "since"), [(key.id, show_instant(key.created_at_us)) for key in found])


@receipts.command()
@with_settings
def rotate(settings: Settings) -> None:
    """Sign with a new key from now on; what the old one signed stays valid."""
    with open_store(settings) as store:
        key = KeyRing(store, DataLayout(settings.data_dir).secrets_dir).replace()
    say(f"Receipts are signed with key {key.id} from now on.")


def _public_keys(settings: Settings, keys_file: Path | None) -> dict[str, bytes]:
    if keys_file is not None:
        return read_key_set(_read_json(keys_file))
    with open_store(settings) as store, store.reading() as connection:
        return {key.id: key.public_key for key in list_keys(connection)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refusal(f"{path} is not JSON: {error}") from error


def _print(receipt: Receipt, problems: list[str], *, is_derived: bool) -> None:
    out = console()
    out.print(f"request {receipt.request_id}  {receipt.model}", markup=False)
    out.print(
        f"{receipt.prompt_tokens:,} prompt tokens, {receipt.cached_prompt_tokens:,} of them cached, "
        f"{receipt.completion_tokens:,} generated"
    )
    for problem in problems:
        out.print(f"wrong: {problem}", markup=False)
    if problems:
        out.print("[red]This receipt does not hold.[/]")
    elif is_derived:
        out.print("[green]The signature, the arithmetic and the counts of the prompt are right.[/]")
    else:
        out.print("[green]The signature and the arithmetic are right.[/]")
