from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from billing.config import BillingConfig, RateCardConfig
from billing.late_cards import late_cards
from billing.rates import RateBook
from billing.store import Store
from gateway.books import Books
from tests.support.ledger import ACCOUNT, OTHER_ACCOUNT, book, card, record


def found(store: Store, rate_book: RateBook) -> list[tuple[str, str]]:
    with store.reading() as connection:
        return [(late.billed_with[:10], late.card[:10]) for late in late_cards(connection, rate_book)]


@pytest.fixture
def billed(store: Store, rate_book: RateBook) -> Store:
    store.post([record(number) for number in range(5)], rate_book)
    return store


def test_cards_that_were_there_in_time_are_silent(billed: Store, rate_book: RateBook) -> None:
    assert found(billed, rate_book) == []
    assert found(billed, book(card(), card(effective_from="2026-12-01", output="9"))) == []
    assert found(billed, book(card(), card("another", effective_from="2026-11-30", output="9"))) == []


def test_a_card_of_today_reaches_back_over_this_morning(billed: Store) -> None:
    late = book(card(), card(effective_from="2026-11-30", output="9"))
    assert found(billed, late) == [("2026-01-01", "2026-11-30")]
    with billed.reading() as connection:
        [one] = late_cards(connection, late)
    assert one.request_id == record(0).request_id
    assert "was billed with '2026-01-01 " in str(one)


def test_requests_after_the_card_are_right(store: Store) -> None:
    late = book(card(), card(effective_from="2026-11-30", output="9"))
    store.post([record(number) for number in range(5)], late)
    assert found(store, late) == []


def test_a_changed_price_is_late(billed: Store) -> None:
    assert found(billed, book(card(output="9"))) == [("2026-01-01", "2026-01-01")]


def test_a_card_of_one_account_concerns_it_alone(billed: Store) -> None:
    def with_own(account: str) -> RateBook:
        own = card(effective_from="2026-11-30", output="9")
        return book(card(), msgspec.structs.replace(own, account=account))

    assert found(billed, with_own(ACCOUNT)) == [("2026-01-01", "2026-11-30")]
    assert found(billed, with_own(OTHER_ACCOUNT)) == []


def test_a_gateway_warns_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = record().model

    def cards(*days: str) -> BillingConfig:
        return BillingConfig(
            rate_cards=[
                RateCardConfig(model=model, effective_from=day, input=f"0.{number}", output="3")
                for number, day in enumerate(days, start=1)
            ]
        )

    books = Books(cards("2026-01-01"), tmp_path)
    books.store.post([record()], books.rate_book)
    with caplog.at_level(logging.WARNING):
        books.start()
        books.close(lambda: None)
        assert caplog.messages == []
        books = Books(cards("2026-01-01", "2026-11-30"), tmp_path)
        books.start()
        books.close(lambda: None)
    [message] = caplog.messages
    assert "billing.rate_cards" in message
    assert record().request_id in message
