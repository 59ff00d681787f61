from __future__ import annotations

from sqlalchemy import select

from billing.schema import sign_outs
from billing.sign_outs import SignOuts, is_signed_out
from billing.store import Store


def test_a_session_stays_ended_as_long_as_it_could_last(store: Store) -> None:
    now_us = [1_000_000]
    ended = SignOuts(store, lambda: now_us[0])
    ended.end("one", 60)
    ended.end("one", 60)
    with store.reading() as connection:
        assert is_signed_out(connection, "one")
        assert not is_signed_out(connection, "two")
    now_us[0] += 60_000_000
    ended.end("two", 60)
    with store.reading() as connection:
        assert list(connection.scalars(select(sign_outs.c.session_id))) == ["two"]
