from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.accounts import AccountDirectory
from billing.audit import audit
from billing.periods import day_start_us, parse_date
from billing.rates import RateBook
from billing.reports import balance_nanos
from billing.statement import UnknownAccountError, monthly_statement
from billing.store import Store
from billing.usage import STATUSES, Status, UsageRecord
from tests.support.ledger import ACCOUNT, FREE, KIMI, OTHER_ACCOUNT, PLAIN, book, card, record

DECEMBER_US = day_start_us(parse_date("2026-12-01"))
JANUARY_US = day_start_us(parse_date("2027-01-01"))


def test_a_month_that_is_not_over_says_so(store: Store, rate_book: RateBook) -> None:
    store.post([record(0)], rate_book)
    assert monthly_statement(store, ACCOUNT, "2020-02").as_of is None
    running = monthly_statement(store, ACCOUNT, "2999-12")
    assert running.as_of is not None
    assert running.as_of < running.until


def test_lines_by_model_and_token_class(store: Store, rate_book: RateBook) -> None:
    store.post([record(0), record(1), record(2, model=PLAIN), record(3, account_id=OTHER_ACCOUNT)], rate_book)
    bill = monthly_statement(store, ACCOUNT, "2026-11")
    assert [
        (line.model, line.token_class, line.num_tokens, line.rate, line.amount) for line in bill.lines
    ] == [
        (PLAIN, "input", 200, "0.60", "0.00012"),
        (PLAIN, "cached_input", 800, "0.60", "0.00048"),
        (PLAIN, "output", 50, "3.00", "0.00015"),
        (KIMI, "input", 400, "0.60", "0.00024"),
        (KIMI, "cached_input", 1_600, "0.10", "0.00016"),
        (KIMI, "output", 100, "3.00", "0.0003"),
    ]
    assert bill.account_name == "First"
    assert (bill.amount, bill.undiscounted, bill.discount) == ("0.00145", "0.00225", "0.0008")
    assert bill.num_requests == 3
    assert bill.lines[4].discount_nanos == bill.discount_nanos == 800_000


def test_a_month_is_half_open(store: Store, rate_book: RateBook) -> None:
    store.post(
        [
            record(number, started_at_us=instant)
            for number, instant in enumerate([DECEMBER_US - 1, DECEMBER_US, JANUARY_US - 1, JANUARY_US])
        ],
        rate_book,
    )
    bill = monthly_statement(store, ACCOUNT, "2026-12")
    assert bill.num_requests == 2
    assert (bill.since, bill.until) == ("2026-12-01T00:00:00.000000Z", "2027-01-01T00:00:00.000000Z")


def test_a_price_that_changed_makes_lines_of_its_own(store: Store) -> None:
    rates = book(card(), card(effective_from="2026-12-15", input="1", cached_input="0.5", output="5"))
    change_us = day_start_us(parse_date("2026-12-15"))
    store.post([record(0, started_at_us=change_us - 1), record(1, started_at_us=change_us)], rates)
    bill = monthly_statement(store, ACCOUNT, "2026-12")
    assert [
        (line.rate_card_version[:10], line.rate) for line in bill.lines if line.token_class == "input"
    ] == [
        ("2026-01-01", "0.60"),
        ("2026-12-15", "1.00"),
    ]


def test_what_is_not_charged_is_counted_and_costs_nothing(store: Store, rate_book: RateBook) -> None:
    store.post(
        [
            record(0, status="replica_lost"),
            record(1, model="@cf/unknown"),
            record(2, is_estimated=True, status="client_disconnected"),
        ],
        rate_book,
    )
    bill = monthly_statement(store, ACCOUNT, "2026-11")
    assert (bill.num_requests, bill.num_not_charged, bill.num_unpriced, bill.num_estimated) == (3, 1, 1, 1)
    assert bill.amount_nanos == sum(line.amount_nanos for line in bill.lines) == 350_000


def test_an_empty_month_is_a_statement(store: Store) -> None:
    bill = monthly_statement(store, ACCOUNT, "2020-02")
    assert (bill.lines, bill.amount, bill.neurons) == ([], "0.00", 0.0)


def test_an_unknown_account_is_refused(store: Store) -> None:
    with pytest.raises(UnknownAccountError, match="there is no account"):
        monthly_statement(store, "0" * 32, "2026-11")


def test_a_bad_month_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="is not a month"):
        monthly_statement(store, ACCOUNT, "November")


RECORDS = st.lists(
    st.tuples(
        st.sampled_from([KIMI, PLAIN, FREE]),
        st.sampled_from(STATUSES),
        st.integers(0, 5_000_000),
        st.floats(0, 1),
        st.integers(0, 100_000),
        st.sampled_from(["2026-11-30", "2026-12-01", "2026-12-14", "2026-12-15", "2026-12-31"]),
    ),
    max_size=25,
)
PRICES = {
    (KIMI, False): ("0.600001", "0.100003", "3.0007"),
    (KIMI, True): ("0.7", "0.000001", "2.999999"),
    (PLAIN, False): ("0.123457", "0.123457", "1"),
    (PLAIN, True): ("0.123457", "0.123457", "1"),
    (FREE, False): ("0", "0", "0"),
    (FREE, True): ("0", "0", "0"),
}


def test_from_record_to_statement_agrees_with_decimals(store: Store) -> None:
    """Price, post, bill, and compare with an independent computation in decimals."""
    rates = book(
        card(KIMI, "2026-01-01", *PRICES[KIMI, False]),
        card(KIMI, "2026-12-15", *PRICES[KIMI, True]),
        card(PLAIN, "2026-01-01", "0.123457", None, "1"),
        card(FREE, "2026-01-01", "0", "0", "0"),
    )
    accounts = AccountDirectory(store)

    @settings(max_examples=40, deadline=None)
    @given(drawn=RECORDS)
    def check(drawn: list[tuple[str, Status, int, float, int, str]]) -> None:
        account_id = accounts.create_account("Drawn").id
        made, expected, undiscounted = drawn_records(account_id, drawn)
        store.post(made, rates)
        store.post(made, rates)
        bill = monthly_statement(store, account_id, "2026-12")
        assert Decimal(bill.amount) == expected
        assert Decimal(bill.undiscounted) == undiscounted
        assert sum(entry.amount_nanos for entry in bill.lines) == bill.amount_nanos
        assert sum(entry.undiscounted_nanos for entry in bill.lines) == bill.undiscounted_nanos
        november = monthly_statement(store, account_id, "2026-11")
        assert balance_nanos(store, account_id) == bill.amount_nanos + november.amount_nanos
        assert bill.num_requests + november.num_requests == len(made)

    check()
    assert audit(store, rates).findings == []


def drawn_records(
    account_id: str, drawn: list[tuple[str, Status, int, float, int, str]]
) -> tuple[list[UsageRecord], Decimal, Decimal]:
    """The records, and what those of December cost with and without the cache."""
    made, expected, undiscounted = [], Decimal(0), Decimal(0)
    for number, (model, status, prompt, share, completion, day) in enumerate(drawn):
        cached = int(prompt * share)
        made.append(
            record(
                request_id=f"{account_id}-{number}",
                account_id=account_id,
                model=model,
                status=status,
                started_at_us=day_start_us(parse_date(day)),
                prompt_tokens=prompt,
                cached_prompt_tokens=cached,
                completion_tokens=completion,
            )
        )
        if status in ("ok", "client_disconnected") and day >= "2026-12-01":
            full, discounted, output = map(Decimal, PRICES[model, day >= "2026-12-15"])
            rest = line(prompt - cached, full) + line(completion, output)
            expected += rest + line(cached, discounted)
            undiscounted += rest + line(cached, full)
    return made, expected, undiscounted


def line(count: int, dollars_per_million: Decimal) -> Decimal:
    return (count * dollars_per_million / 10**6).quantize(Decimal("1e-9"), rounding=ROUND_HALF_EVEN)
