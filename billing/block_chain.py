"""The chain of block hashes that names a cached prefix, as whoever checks a receipt derives it.

A replica hashes each full block of a prompt's tokens, chained to the one before, from a root that follows
from the account's salt. This is the same rule written down a second time on purpose: what checks the engine
must not be the engine. A test holds the two together.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

BLOCK_CHAIN = "embergate.kv.1"

_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")


def root_digest(salt: bytes) -> bytes:
    """The root of an account's chains. It can be shown: neither the salt nor another root follows from it."""
    parts = (b"embergate.kv.1.root", _LENGTH.pack(len(salt)), salt)
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()


def chain_head(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    block_extras: Mapping[int, bytes],
) -> bytes:
    """The digest of block ``num_blocks - 1`` of the prompt; ``root`` for no block at all."""
    head = root
    for index in range(num_blocks):
        ids = token_ids[index * block_size : (index + 1) * block_size]
        extra = block_extras.get(index, b"")
        parts = (
            b"embergate.kv.1.block",
            head,
            _LENGTH.pack(len(ids)),
            struct.pack(f"<{len(ids)}i", *ids),
            _LENGTH.pack(len(extra)),
            extra,
        )
        head = blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()
    return head
