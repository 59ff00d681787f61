"""An engine with the fake model in this process, as the HTTP side sees one: for transfers without processes.

``is_stalled`` and :meth:`LocalEngine.stop` do what processes do at the worst moment.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig, TransferConfig
from backend.engine.client import EngineDiedError, SequenceStream
from backend.engine.engine import Engine
from backend.engine.messages import EngineInfo, SequenceRequest, ToExchange, TransferReport
from backend.engine.transfers import take_message
from backend.transfer.exchange import create_exchange
from tests.support.fake_engine import FakeRunner


def local_config(**transfer: object) -> BackendConfig:
    """A small replica that exchanges blocks."""
    fields = {"is_enabled": True, "stall_timeout_s": 1.0, "lease_s": 2.0, "transfer_timeout_s": 5.0}
    return BackendConfig(
        replica_id="local",
        model=ModelSource(path="fake", served_as="fake", max_model_len=512),
        pool_token="a secret of the pool",
        cache=CacheConfig(num_blocks=96),
        scheduler=SchedulerConfig(max_tokens_per_step=64, max_running=8, max_waiting=64),
        transfer=TransferConfig(**{**fields, **transfer}),  # type: ignore[arg-type]
    )


class LocalEngine:
    """Steps in a task of the event loop, a moment apart."""

    def __init__(self, config: BackendConfig, *, num_slots: int = 12) -> None:
        self.engine = Engine(
            FakeRunner(), config, clock_s=time.monotonic, draw_seed=itertools.count(1).__next__
        )
        self.engine.connect(
            lambda layout: create_exchange(layout, num_slots * layout.record_bytes), config.transfer
        )
        self.is_stalled = False
        self._streams: dict[int, SequenceStream] = {}
        self._ids = itertools.count(1)
        self._report: Callable[[TransferReport], None] = lambda report: None
        self._task = asyncio.create_task(self._run())

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def num_unused(self) -> int:
        """Blocks that nothing holds."""
        stats = self.engine.stats()
        return stats.num_free_blocks + stats.num_cached_blocks

    def new_sequence_id(self) -> int:
        return next(self._ids)

    def submit(self, request: SequenceRequest) -> SequenceStream:
        if self._task.done():
            raise EngineDiedError("the engine process has ended")
        stream = SequenceStream(self, request.sequence_id)  # type: ignore[arg-type]
        self._streams[request.sequence_id] = stream
        self.engine.submit(request)
        return stream

    def abort(self, sequence_id: int) -> None:
        if not self._task.done():
            self.engine.abort(sequence_id)

    def tell(self, message: ToExchange) -> None:
        assert self.engine.transfers is not None
        if not self._task.done():
            take_message(self.engine.transfers, message)

    def on_transfers(self, callback: Callable[[TransferReport], None]) -> None:
        self._report = callback

    async def stop(self) -> None:
        """End as a killed process does: without a word."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for stream in self._streams.values():
            stream._fail(EngineDiedError("the engine process has ended"))
        self._streams.clear()

    async def _run(self) -> None:
        transfers = self.engine.transfers
        assert transfers is not None
        while True:
            if not self.is_stalled:
                if self.engine.has_work:
                    self.engine.step()
                for output in self.engine.take_outputs():
                    stream = self._streams.get(output.sequence_id)
                    if stream is not None:
                        stream._push(output)
                        if output.finish_reason is not None:
                            del self._streams[output.sequence_id]
                report = transfers.advance()
                if report is not None:
                    self._report(report)
            await asyncio.sleep(0.0005)
