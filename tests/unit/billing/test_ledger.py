from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.ledger import LedgerEntry, Transaction, UnbalancedError, charge_transaction
from tests.support.ledger import ACCOUNT, KIMI, book, record


def test_a_charge_debits_the_account_and_credits_revenue() -> None:
    one = record()
    transaction = charge_transaction(one, book().price(one))
    assert transaction.id == one.request_id
    assert transaction.occurred_at_us == one.started_at_us
    assert transaction.entries == (
        LedgerEntry(f"receivable:{ACCOUNT}", 350_000),
        LedgerEntry(f"revenue:{KIMI}", -350_000),
    )


def test_what_is_not_charged_makes_a_transaction_of_nothing() -> None:
    lost = record(status="replica_lost")
    transaction = charge_transaction(lost, book().price(lost))
    assert [entry.amount_nanos for entry in transaction.entries] == [0, 0]


@given(amounts=st.lists(st.integers(-(10**15), 10**15), max_size=5))
def test_only_entries_that_sum_to_zero_make_a_transaction(amounts: list[int]) -> None:
    entries = tuple(LedgerEntry("revenue:x", amount) for amount in amounts)
    if len(amounts) >= 2 and sum(amounts) == 0:
        assert Transaction("id", "charge", 0, entries).entries == entries
    else:
        with pytest.raises(UnbalancedError):
            Transaction("id", "charge", 0, entries)
    balanced = (*entries, LedgerEntry("revenue:y", -sum(amounts)), LedgerEntry("revenue:z", 0))
    assert Transaction("id", "charge", 0, balanced).id == "id"
