"""Sessions of people that were ended before their time, so that a copied cookie opens nothing either.

In the database, since any gateway of an installation may get the next request. Rows are few: one for each
sign-out, until the session would have ended anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection, delete, select

from billing.dialect import dialect_named
from billing.schema import sign_outs
from billing.store import Store


def is_signed_out(connection: Connection, session_id: str) -> bool:
    """Whether the session was ended."""
    known = select(sign_outs.c.session_id).where(sign_outs.c.session_id == session_id)
    return connection.scalar(known) is not None


class SignOuts:
    """Ends sessions. Blocking, thread-safe."""

    def __init__(self, store: Store, clock: Callable[[], int] = lambda: time.time_ns() // 1_000) -> None:
        """``clock``: UTC microseconds."""
        self._store = store
        self._clock = clock

    def end(self, session_id: str, ttl_s: int) -> None:
        """Remember for ``ttl_s``, how long the session can last, and forget those that are over.

        Raises StoreError.
        """
        now_us = self._clock()
        row = {"session_id": session_id, "expires_at_us": now_us + ttl_s * 1_000_000}
        with self._store.writing() as connection:
            connection.execute(delete(sign_outs).where(sign_outs.c.expires_at_us <= now_us))
            # Twice at once is once: the second post of an impatient person.
            connection.execute(dialect_named(connection.dialect.name).insert_or_skip(sign_outs), row)
