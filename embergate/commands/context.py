"""What most commands begin with: the settings, and the counting house behind them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click

from billing.accounts import AccountError
from billing.config import BillingConfigError
from billing.rates import RateBook
from billing.store import Store, StoreError
from embergate.config_file import Settings, load_settings
from embergate.refusal import Refusal

P = ParamSpec("P")
R = TypeVar("R")


def with_settings(command: Callable[Concatenate[Settings, P], R]) -> Callable[P, R]:
    """Give a command the settings as its first argument."""

    @click.pass_context
    def wrapped(context: click.Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        settings = load_settings(context.find_root().obj, os.environ, Path.cwd())
        return context.invoke(command, settings, *args, **kwargs)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[Store]:
    """The configured database, closed afterwards; its refusals become sentences.

    Raises:
        Refusal: when it cannot be opened, or the accounts or prices asked for are wrong.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    try:
        store = Store.open(settings.config.billing.database_url_in(settings.data_dir))
    except StoreError as error:
        raise Refusal(str(error)) from error
    try:
        yield store
    except (StoreError, AccountError, BillingConfigError) as error:
        raise Refusal(str(error)) from error
    finally:
        store.close()


def rate_book(settings: Settings) -> RateBook:
    """The configured prices."""
    return RateBook.from_config(settings.config.billing)
