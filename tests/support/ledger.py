"""Usage records, rate cards and stores for tests about money."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from billing.accounts import AccountDirectory
from billing.config import BillingConfig, RateCardConfig
from billing.periods import day_start_us, parse_date
from billing.rates import RateBook
from billing.store import Store
from billing.usage import UsageRecord

KIMI = "@cf/moonshotai/kimi-k2.5"
FREE = "@cf/example/free"
PLAIN = "@cf/example/without-cached-price"
ACCOUNT = "0123456789abcdef0123456789abcdef"
OTHER_ACCOUNT = "f" * 32
NOON_US = day_start_us(parse_date("2026-11-30")) + 12 * 3_600 * 1_000_000


def card(
    model: str = KIMI,
    effective_from: str = "2026-01-01",
    input: str = "0.60",  # noqa: A002 - the configuration's own key
    cached_input: str | None = "0.10",
    output: str = "3.00",
) -> RateCardConfig:
    return RateCardConfig(
        model=model, effective_from=effective_from, input=input, cached_input=cached_input, output=output
    )


def book(*cards: RateCardConfig) -> RateBook:
    """A rate book of these cards; without any, of three models that tests know."""
    known = cards or (
        card(),
        card(FREE, input="0", cached_input="0", output="0"),
        card(PLAIN, cached_input=None),
    )
    return RateBook.from_config(BillingConfig(rate_cards=list(known)))


def record(number: int = 0, **changes: Any) -> UsageRecord:
    """A plausible record; the same ``number`` gives the same one."""
    fields: dict[str, Any] = {
        "request_id": f"request-{number:06d}",
        "account_id": ACCOUNT,
        "token_id": "token-1",
        "model": KIMI,
        "requested_model": KIMI,
        "surface": "run",
        "replica_id": "replica-0",
        "session": f"session-{number % 3}",
        "started_at_us": NOON_US + number,
        "finished_at_us": NOON_US + number + 500_000,
        "prompt_tokens": 1_000,
        "cached_prompt_tokens": 800,
        "completion_tokens": 50,
    }
    return UsageRecord(**(fields | changes))


def records(count: int, seed: int = 0) -> list[UsageRecord]:
    """Different ones: statuses, models, tokens and days vary with the seed."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt = draw.randrange(200_000)
        made.append(
            record(
                number,
                request_id=f"request-{seed}-{number:06d}",
                model=draw.choice([KIMI, PLAIN, FREE]),
                status=draw.choice(
                    ["ok", "ok", "ok", "client_disconnected", "replica_lost", "timeout", "error"]
                ),
                started_at_us=NOON_US + draw.randrange(-3, 3) * 86_400_000_000 + number,
                prompt_tokens=prompt,
                cached_prompt_tokens=draw.randint(0, prompt),
                completion_tokens=draw.randrange(10_000),
                is_estimated=draw.random() < 0.1,
            )
        )
    return made


def groups_of(items: list[UsageRecord], size: int) -> Iterator[list[UsageRecord]]:
    waiting = iter(items)
    while group := list(itertools.islice(waiting, size)):
        yield group


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store of a URL, with a clock that stands still."""
    store = Store.open(url, clock=lambda: NOON_US)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def open_store(directory: Path) -> Iterator[Store]:
    """A store in a file, with the two accounts that records name."""
    url = f"sqlite:///{directory / 'ledger.db'}"
    prepare(url)
    with opened(url) as store:
        yield store


def drop_guards(connection: Connection, table: str) -> None:
    """Let an append-only table be changed, as someone with access to the database could."""
    if connection.dialect.name == "sqlite":
        for verb in ("update", "delete"):
            connection.execute(text(f"DROP TRIGGER {table}_no_{verb}"))
    else:
        connection.execute(text(f"DROP TRIGGER {table}_no_change ON {table}"))


def prepare(url: str) -> None:
    """Migrate a database, and make the two accounts that records name where they are missing."""
    with opened(url) as store:
        accounts = AccountDirectory(store, clock=lambda: NOON_US)
        known = {account.id for account in accounts.list_accounts()}
        for name, account_id in (("First", ACCOUNT), ("Second", OTHER_ACCOUNT)):
            if account_id not in known:
                accounts.create_account(name, account_id)
