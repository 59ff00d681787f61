"""Receipts: the same every time, signed, and wrong as soon as one count is changed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.engine import prefix_cache
from billing.block_chain import chain_head, root_digest
from billing.rates import RateBook
from billing.receipt_keys import KeyRing, SigningKey, key_set, list_keys, read_key_set
from billing.receipts import (
    BadReceiptError,
    Receipt,
    canonical,
    find_receipt,
    problems_of,
    prompt_problems,
    sign,
    verify,
)
from billing.store import Store
from tests.support.ledger import ACCOUNT, NOON_US, OTHER_ACCOUNT, record, records

SALT = "5a" * 32
PROMPT = [random.Random(1).randrange(30_000) for _ in range(1_000)]
HEAD = chain_head(root_digest(SALT.encode()), PROMPT, 16, 50, {})
CACHED = {"prompt_tokens": 1_000, "cached_prompt_tokens": 800, "num_cached_blocks": 50}


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return SigningKey.generate()


@pytest.fixture
def receipt(store: Store, rate_book: RateBook) -> Receipt:
    store.post([record(**CACHED, cache_head=HEAD.hex())], rate_book)
    found = find(store)
    assert found is not None
    return found


def find(store: Store, request_id: str = "request-000000", account_id: str = ACCOUNT) -> Receipt | None:
    with store.reading() as connection:
        return find_receipt(connection, account_id, request_id, cache_salt=SALT, currency="USD")


def test_the_chain_is_the_engine_s_own() -> None:
    """BR-15: two derivations of one hash agree, with and without extras."""
    head = prefix_cache.root_digest(b"salt")
    assert root_digest(b"salt") == head
    extras = {1: b"image"}
    for index in range(4):
        block = PROMPT[index * 16 : (index + 1) * 16]
        head = prefix_cache.block_digest(head, block, extras.get(index, b""))
    assert chain_head(root_digest(b"salt"), PROMPT, 16, 4, extras) == head


class TestReceipt:
    def test_says_what_was_charged_and_why(self, receipt: Receipt) -> None:
        assert (receipt.amount_nanos, receipt.undiscounted_nanos) == (350_000, 750_000)
        assert [(line.token_class, line.num_tokens, line.rate_micros) for line in receipt.lines] == [
            ("input", 200, 600_000),
            ("cached_input", 800, 100_000),
            ("output", 50, 3_000_000),
        ]
        assert receipt.cache is not None
        assert (receipt.cache.num_blocks, receipt.cache.block_size) == (50, 16)
        assert problems_of(receipt) == []

    def test_is_the_same_every_time(self, store: Store, receipt: Receipt, key: SigningKey) -> None:
        again = find(store)
        assert again is not None
        assert sign(again, key) == sign(receipt, key)

    def test_does_not_show_the_salt(self, receipt: Receipt) -> None:
        text = msgspec.json.encode(receipt).decode()
        assert SALT not in text
        assert root_digest(SALT.encode()).hex() in text

    def test_is_for_its_account_alone(self, store: Store, receipt: Receipt) -> None:
        assert find(store, account_id=OTHER_ACCOUNT) is None
        assert find(store, "unknown") is None

    def test_every_record_makes_a_sound_one(self, store: Store, rate_book: RateBook) -> None:
        given = records(200, seed=9)
        given += [record(900, surface="batch"), record(901, free_neurons_e4=1_234)]
        store.post([*given, record(902, model="unpriced")], rate_book)
        for one in [*given, record(902)]:
            found = find(store, one.request_id)
            assert found is not None
            assert problems_of(found) == []


class TestVerify:
    def signed(self, receipt: Receipt, key: SigningKey) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(msgspec.json.encode(sign(receipt, key)))
        return document

    def test_a_signed_one_holds(self, receipt: Receipt, key: SigningKey) -> None:
        document = self.signed(receipt, key)
        assert verify(document, {key.id: key.public_bytes}) == (receipt, [])
        assert verify({"result": document, "success": True}, {key.id: key.public_bytes}) == (receipt, [])

    @pytest.mark.parametrize(
        "field", ["prompt_tokens", "cached_prompt_tokens", "completion_tokens", "amount_nanos", "neurons_e4"]
    )
    def test_one_changed_count_does_not(self, receipt: Receipt, key: SigningKey, field: str) -> None:
        document = self.signed(receipt, key)
        document["receipt"][field] += 1
        _, problems = verify(document, {key.id: key.public_bytes})
        assert "the signature does not belong to this receipt" in problems

    def test_an_added_member_does_not_either(self, receipt: Receipt, key: SigningKey) -> None:
        document = self.signed(receipt, key)
        document["receipt"]["note"] = "paid"
        assert verify(document, {key.id: key.public_bytes})[1] != []

    def test_nor_one_of_another_key_or_of_none(self, receipt: Receipt, key: SigningKey) -> None:
        other = SigningKey.generate()
        document = self.signed(receipt, other)
        assert verify(document, {key.id: key.public_bytes})[1] == [f"the key {other.id} is not known"]
        document["signature"]["key_id"] = key.id
        assert verify(document, {key.id: key.public_bytes})[1] != []
        document["signature"]["algorithm"] = "none"
        assert "algorithm is 'none'" in verify(document, {key.id: key.public_bytes})[1][0]

    @pytest.mark.parametrize("document", [{}, [], None, {"receipt": {}, "signature": {}}])
    def test_what_is_no_receipt_is_named_so(self, document: Any) -> None:
        with pytest.raises(BadReceiptError, match="this is no signed receipt"):
            verify(document, {})

    def test_floats_have_no_place_in_one(self) -> None:
        with pytest.raises(BadReceiptError, match="integers only"):
            canonical({"a": [1.5]})

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"prompt_tokens": 1_001}, "input: 200 tokens, not 201"),
            ({"completion_tokens": 51}, "output: 50 tokens, not 51"),
            ({"cached_prompt_tokens": 784}, "50 blocks of 16 tokens are not 784 cached tokens"),
            ({"cached_prompt_tokens": 1_001}, "more tokens are cached than the prompt has"),
            ({"amount_nanos": 349_999}, "the amount is not the sum of the lines"),
            ({"free_nanos": 1}, "the amount is not the sum of the lines"),
            ({"undiscounted_nanos": 1}, "the undiscounted amount does not follow"),
            ({"rate_card_version": "2026-01-01 1/2/3"}, "input: the rate is not that of the rate card"),
            ({"lines": []}, "an amount without lines"),
            ({"version": 2}, "version 2 is not known here"),
        ],
    )
    def test_what_does_not_add_up_is_named(
        self, receipt: Receipt, changes: dict[str, Any], problem: str
    ) -> None:
        problems = problems_of(msgspec.structs.replace(receipt, **changes))
        assert any(found.startswith(problem) for found in problems), problems


class TestPrompt:
    def test_the_right_prompt_bears_the_receipt_out(self, receipt: Receipt) -> None:
        assert prompt_problems(receipt, PROMPT) == []

    def test_another_token_among_the_cached_ones_does_not(self, receipt: Receipt) -> None:
        other = [*PROMPT[:799], PROMPT[799] + 1, *PROMPT[800:]]
        assert prompt_problems(receipt, other) == ["the cached blocks are not those of this request's prompt"]
        assert prompt_problems(receipt, [*PROMPT[:800], *(7 for _ in range(200))]) == []

    def test_another_number_of_blocks_does_not(self, receipt: Receipt) -> None:
        assert receipt.cache is not None
        fewer = msgspec.structs.replace(receipt.cache, num_blocks=49)
        assert prompt_problems(msgspec.structs.replace(receipt, cache=fewer), PROMPT) != []

    def test_another_length_does_not(self, receipt: Receipt) -> None:
        (problem,) = prompt_problems(receipt, PROMPT[:-1])
        assert problem == "the request makes 999 prompt tokens, the receipt says 1000"


class TestKeys:
    def test_one_is_made_on_first_use_and_can_be_looked_up(self, store: Store, tmp_path: Path) -> None:
        ring = KeyRing(store, tmp_path / "secrets", clock=lambda: NOON_US)
        key = ring.signing_key()
        assert ring.signing_key() is key
        with store.reading() as connection:
            assert read_key_set(key_set(list_keys(connection))) == {key.id: key.public_bytes}
        (path,) = (tmp_path / "secrets").iterdir()
        assert path.stat().st_mode & 0o777 == 0o600

    def test_another_process_signs_with_the_same(self, store: Store, tmp_path: Path) -> None:
        assert KeyRing(store, tmp_path).signing_key().id == KeyRing(store, tmp_path).signing_key().id

    def test_a_new_key_is_used_at_once_and_the_old_one_still_checks(
        self, store: Store, receipt: Receipt, tmp_path: Path
    ) -> None:
        running = KeyRing(store, tmp_path)
        old = running.signing_key()
        signed = json.loads(msgspec.json.encode(sign(receipt, old)))
        KeyRing(store, tmp_path).replace()
        assert running.signing_key().id != old.id
        with store.reading() as connection:
            public_keys = {key.id: key.public_key for key in list_keys(connection)}
        assert len(public_keys) == 2
        assert verify(signed, public_keys) == (receipt, [])
