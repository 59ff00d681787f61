"""Whether a replica takes requests: starting, ready or draining."""

from __future__ import annotations

from typing import Literal

from backend.engine.messages import EngineStats, StartProgress
from backend.http.engine_port import Engine
from backend.http.errors import engine_died, not_serving
from backend.http.prompts import PromptEncoder
from backend.transfer.fetching import Fetcher
from backend.transfer.service import TransferService

Status = Literal["starting", "ready", "draining"]


class ReplicaState:
    """The one place that knows. Ready from :meth:`become_ready` on, except while draining."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._prompts: PromptEncoder | None = None
        self._is_draining = False
        self.transfers: TransferService | None = None
        self.progress = StartProgress(0.0, "starting the engine")

    def report(self, progress: StartProgress) -> None:
        """Take in how far the start is."""
        self.progress = progress

    @property
    def status(self) -> Status:
        if self._is_draining:
            return "draining"
        return "starting" if self._engine is None else "ready"

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def become_ready(
        self, engine: Engine, prompts: PromptEncoder, transfers: TransferService | None = None
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self.transfers = transfers

    def drain(self) -> None:
        """Take no more requests; those in progress go on."""
        self._is_draining = True

    def resume(self) -> None:
        self._is_draining = False

    def serving(self) -> tuple[Engine, PromptEncoder]:
        """What serves a request.

        Raises:
            ReplicaError: 503 while starting or draining, 500 when the engine has ended.
        """
        if self._is_draining or self._engine is None or self._prompts is None:
            raise not_serving(self.status)
        if self._engine.died.done():
            raise engine_died()
        return self._engine, self._prompts

    @property
    def fetcher(self) -> Fetcher | None:
        """Brings prompts from other replicas; None where that is not set up."""
        return None if self.transfers is None else self.transfers.fetcher

    def read_stats(self) -> EngineStats | None:
        """The engine's figures, or None while there is no engine."""
        return None if self._engine is None else self._engine.stats()
