"""The spool against a model: whatever happens in whatever order, no acknowledged record is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from billing.config import SpoolConfig
from billing.segments import Disk, list_segments
from billing.spool import Spool
from billing.usage import UsageRecord
from tests.support.ledger import record

CONFIG = SpoolConfig(max_segment_bytes=2_500, reserve_bytes=300)


class NoFlush(Disk):
    """The test never cuts the power, so it need not wait for the medium."""

    def flush(self, descriptor: int) -> None:
        pass


class SpoolMachine(RuleBasedStateMachine):
    """``waiting`` are the acknowledged records not yet marked; ``marked`` may come back after a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(prefix="spool-model-"))
        self.life = 0
        self.spool = Spool(self.directory, CONFIG, NoFlush())
        self.num_made = 0
        self.waiting: list[UsageRecord] = []
        self.marked: list[UsageRecord] = []

    @property
    def directory(self) -> Path:
        return self.root / str(self.life)

    @rule(count=st.integers(1, 6))
    def append(self, count: int) -> None:
        group = [record(self.num_made + number) for number in range(count)]
        self.num_made += count
        self.spool.append(group)
        self.waiting.extend(group)

    @rule(limit=st.integers(1, 15))
    def post(self, limit: int) -> None:
        batch = self.spool.read_batch(limit)
        if batch is None:
            assert self.waiting == []
            return
        count = len(batch.records)
        assert batch.records == self.waiting[:count]
        self.spool.mark_posted(batch)
        self.marked.extend(self.waiting[:count])
        del self.waiting[:count]

    @rule()
    def restart(self) -> None:
        self.spool.close()
        self._reopen()

    @rule(torn=st.binary(max_size=40))
    def crash(self, torn: bytes) -> None:
        """The files as they are, and perhaps the beginning of another append."""
        left = self.directory
        self.life += 1
        shutil.copytree(left, self.directory)
        self.spool.close()
        if torn and (segments := list_segments(self.directory)):
            newest = segments[-1][1]
            data = newest.read_bytes()
            newest.write_bytes(data.rstrip(b"\0") + b"\0" * 8 + torn)
        self._reopen()

    def _reopen(self) -> None:
        """What was marked in a segment that still exists comes again, and before the rest."""
        self.spool = Spool(self.directory, CONFIG, NoFlush())
        num_again = self.spool.num_unposted - len(self.waiting)
        assert 0 <= num_again <= len(self.marked)
        again = self.marked[len(self.marked) - num_again :]
        del self.marked[len(self.marked) - num_again :]
        self.waiting = again + self.waiting

    @invariant()
    def counts(self) -> None:
        assert self.spool.num_unposted == len(self.waiting)

    def teardown(self) -> None:
        while self.waiting:
            self.post(100)
        self.spool.close()
        assert list_segments(self.directory) == []
        shutil.rmtree(self.root)


TestSpoolMachine = SpoolMachine.TestCase
TestSpoolMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
