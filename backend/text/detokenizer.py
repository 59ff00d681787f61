"""Token ids to text, one at a time, never half a character.

Invariant: the pieces returned by :meth:`Detokenizer.push` and :meth:`Detokenizer.flush`, joined, are the
decoding of the whole sequence of ids. Bytes that cannot yet be a character wait inside; they become U+FFFD
only when a later byte proves them wrong or the text ends there. Each id costs the same whatever came before
it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The decoder of one generated text.

    Args:
        token_bytes: the bytes of every token id of the vocabulary; empty for ids that show nothing.
    """

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _new_decoder("replace")

    def push(self, token_id: int) -> str:
        """Take one token; return the characters that are now certain, perhaps none."""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """End the text; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
