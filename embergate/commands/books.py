"""The counting house as commands open it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from billing.accounts import AccountError
from billing.config import BillingConfigError
from billing.rates import RateBook
from billing.spool import read_spooled
from billing.store import Store, StoreError
from embergate.config_file import Settings
from embergate.layout import DataLayout
from embergate.refusal import Refusal


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[Store]:
    """The configured database, closed afterwards; its refusals become sentences.

    Raises:
        Refusal: when it cannot be opened, or the accounts or prices asked for are wrong.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    try:
        store = Store.of_config(settings.config.billing, settings.data_dir)
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


def num_unposted(settings: Settings, store: Store) -> int:
    """How many usage records wait in the journal and are not in the database yet."""
    waiting = {record.request_id for record in read_spooled(DataLayout(settings.data_dir).spool_dir)}
    return len(waiting) - len(store.has_record(waiting))
