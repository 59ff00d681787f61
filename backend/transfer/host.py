"""The host tier: contents of evicted KV blocks in memory, least recently used first to go.

Domain: a block lives in here only while the KV cache has not got it: what is taken back leaves. So the tier
adds its whole size to the cache's. Names are digests, which chain from the account's salt; one tier belongs
to one engine, hence to one layout.

Torch-free, no clock, not thread-safe. Time: O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict


class HostTier:
    """At most ``max_bytes`` of contents."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._contents: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._contents

    def put(self, digest: bytes, content: bytes) -> list[tuple[bytes, bytes]]:
        """Keep a block as the most recently used; returns those that had to go for it, with contents.

        A content larger than the whole tier goes itself.
        """
        self.take(digest)
        self._contents[digest] = content
        self.num_bytes += len(content)
        pushed_out: list[tuple[bytes, bytes]] = []
        while self.num_bytes > self._max_bytes:
            oldest, gone = self._contents.popitem(last=False)
            self.num_bytes -= len(gone)
            pushed_out.append((oldest, gone))
        return pushed_out

    def take(self, digest: bytes) -> bytes | None:
        """Take a block out; None when it is not here."""
        content = self._contents.pop(digest, None)
        if content is not None:
            self.num_bytes -= len(content)
        return content

    def give_up(self) -> list[tuple[bytes, bytes]]:
        """Empty the tier, least recently used first."""
        contents = list(self._contents.items())
        self._contents.clear()
        self.num_bytes = 0
        return contents
