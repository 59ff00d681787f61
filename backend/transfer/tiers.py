"""The tiers below a KV cache as one: where a block is, what goes down, what comes up.

Domain: what the KV cache evicts goes to the host tier, what that pushes out to the disk. On the disk a block
stays when it is taken up again (there it need not be written twice, and a restart finds it); in the host's
memory it does not. So memory adds to the cache's size, and the disk is a cache of its own size below both.

Torch-free: contents are bytes. All methods belong to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from itertools import takewhile

from backend.transfer.host import HostTier
from backend.transfer.promotion import Tier
from backend.transfer.tier_thread import Loaded, TierThread


class Tiers:
    """At least one of ``host`` and ``disk``; the order of use is theirs to keep."""

    def __init__(self, host: HostTier | None, disk: TierThread | None) -> None:
        self.host = host
        self.disk = disk
        self.num_demoted = 0

    def place_of(self, digest: bytes) -> Tier | None:
        """The nearest tier that has the block."""
        if self.host is not None and digest in self.host:
            return "host"
        if self.disk is not None and self.disk.holds(digest):
            return "disk"
        return None

    def run_of(self, digests: Iterable[bytes]) -> list[Tier]:
        """The places of the leading blocks of ``digests`` that are here. ``digests`` is read no further."""
        places = map(self.place_of, digests)
        return list(takewhile(lambda place: place is not None, places))  # type: ignore[arg-type]

    def put(self, digest: bytes, content: bytes) -> None:
        """Take in an evicted block."""
        self.num_demoted += 1
        pushed_out = [(digest, content)] if self.host is None else self.host.put(digest, content)
        for each, gone in pushed_out:
            self.save(each, gone)

    def save(self, digest: bytes, content: bytes) -> None:
        """Have a block on the disk too, where there is one and it has not got it."""
        if self.disk is not None and not self.disk.touch(digest):
            self.disk.write(digest, content)

    def fetch(self, digest: bytes) -> Future[Loaded]:
        """A block's content. It leaves the host tier: :meth:`put` it back when it was not used."""
        if self.host is not None and (content := self.host.take(digest)) is not None:
            future: Future[Loaded] = Future()
            future.set_result(Loaded(content, 0.0))
            self.touch([digest])
            return future
        if self.disk is not None:
            return self.disk.read(digest)
        future = Future()
        future.set_result(Loaded(None, 0.0))
        return future

    def touch(self, digests: Iterable[bytes]) -> None:
        """These were used from the cache: on the disk too they are the most recently used."""
        if self.disk is not None:
            for digest in digests:
                self.disk.touch(digest)

    def close(self, flush_s: float) -> None:
        """Write what the host tier has to the disk, as far as ``flush_s`` reaches, and let go."""
        if self.disk is None:
            return
        contents = [] if self.host is None else self.host.give_up()
        self.disk.close(flush_s, [each for each in reversed(contents) if not self.disk.holds(each[0])])
