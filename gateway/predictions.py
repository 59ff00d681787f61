"""What the edge expects the prefix cache to hold: the yardstick for routing that keeps conversations
together.
"""

from __future__ import annotations

from collections import OrderedDict


class CachePredictions:
    """Predicts the cached prompt tokens of a conversation's next turn; keeps the last ``max_sessions`` of
    them.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._last: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()

    def predict(self, account_id: str, key: str, replica_id: str) -> int:
        """The prompt tokens of the previous turn, if it ran on this replica: the least that should be cached
        now.
        """
        last = self._last.get((account_id, key))
        return last[1] if last is not None and last[0] == replica_id else 0

    def last(self, account_id: str, key: str) -> tuple[str, int] | None:
        """The replica that served a conversation's previous turn, and its prompt tokens."""
        return self._last.get((account_id, key))

    def learn(self, account_id: str, key: str, replica_id: str, prompt_tokens: int) -> None:
        """A turn of ``prompt_tokens`` was served by ``replica_id``."""
        session = (account_id, key)
        self._last[session] = (replica_id, prompt_tokens)
        self._last.move_to_end(session)
        if len(self._last) > self._max_sessions:
            self._last.popitem(last=False)
