"""What the HTTP side needs of an engine; :class:`backend.engine.client.EngineClient` is the one that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from backend.engine.client import EngineDeath
from backend.engine.messages import (
    EngineInfo,
    EngineStats,
    SequenceFinish,
    SequenceRequest,
    ToExchange,
    TokenOutput,
    TransferReport,
)


class TokenStream(Protocol):
    """The tokens of one sequence; see :class:`backend.engine.client.SequenceStream`."""

    @property
    def num_generated_tokens(self) -> int: ...

    @property
    def cached_prompt_tokens(self) -> int: ...

    @property
    def cached_head(self) -> bytes: ...

    @property
    def finish_reason(self) -> SequenceFinish | None: ...

    @property
    def is_over(self) -> bool: ...

    def abort(self) -> None: ...

    def __anext__(self) -> Awaitable[TokenOutput]: ...


class Engine(Protocol):
    """A running engine."""

    @property
    def died(self) -> asyncio.Future[EngineDeath]: ...

    @property
    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats: ...

    def new_sequence_id(self) -> int: ...

    def submit(self, request: SequenceRequest) -> TokenStream: ...

    def tell(self, message: ToExchange) -> None: ...

    def on_transfers(self, callback: Callable[[TransferReport], None]) -> None: ...

    async def close(self) -> None: ...
