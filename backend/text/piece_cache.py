"""Encoded pieces of prompts, kept for the next turn.

A conversation is sent whole at every turn, and all of it but the last messages was encoded a moment ago.
Special tokens cut a prompt into pieces that are encoded alone, so a piece's tokens depend on nothing else.

Invariants: at most ``max_chars`` characters of text are held; the least recently used piece leaves first; a
piece is found only under the salt it was kept under (the time to answer tells nobody what others sent).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

# Shorter pieces are cheaper to encode than to look up and keep.
_MIN_CACHED_CHARS: Final = 64


class PieceCache:
    """An LRU map from (salt, text) to token ids, bounded by characters; safe between threads."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._pieces: OrderedDict[tuple[str, str], Sequence[int]] = OrderedDict()
        self._lock = Lock()

    @property
    def num_chars(self) -> int:
        return self._num_chars

    def find(self, salt: str, text: str) -> Sequence[int] | None:
        key = (salt, text)
        with self._lock:
            token_ids = self._pieces.get(key)
            if token_ids is not None:
                self._pieces.move_to_end(key)
            return token_ids

    def keep(self, salt: str, text: str, token_ids: Sequence[int]) -> None:
        if len(text) > self._max_chars:
            return
        key = (salt, text)
        with self._lock:
            if key in self._pieces:
                return
            self._pieces[key] = token_ids
            self._num_chars += len(text)
            while self._num_chars > self._max_chars:
                (_, evicted), _ = self._pieces.popitem(last=False)
                self._num_chars -= len(evicted)

    def encode(
        self, pieces: Sequence[str], encode: Callable[[Sequence[str]], Sequence[Sequence[int]]], salt: str
    ) -> list[Sequence[int]]:
        """The token ids of each piece; only those that are not known go through ``encode``, all at once."""
        encoded: list[Sequence[int]] = [()] * len(pieces)
        missing: list[int] = []
        for index, piece in enumerate(pieces):
            if not piece:
                continue
            known = self.find(salt, piece) if len(piece) >= _MIN_CACHED_CHARS else None
            if known is None:
                missing.append(index)
            else:
                encoded[index] = known
        if missing:
            for index, token_ids in zip(missing, encode([pieces[i] for i in missing]), strict=True):
                encoded[index] = token_ids
                if len(pieces[index]) >= _MIN_CACHED_CHARS:
                    self.keep(salt, pieces[index], tuple(token_ids))
        return encoded
