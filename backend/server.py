"""One replica's HTTP server: builds its parts, listens, starts the engine, and ends as a replica should.

It listens before the model is loaded, so that ``/health`` can say "starting". On the first SIGTERM or
SIGINT it drains: no new requests, those in progress finish within the grace, and the exit code is 0. When
the engine process ends, open requests end with an error and the exit code is 1, so that a supervisor starts
a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from backend.config import BackendConfig, TextConfig
from backend.engine.client import EngineClient, EngineStartError
from backend.engine.messages import EngineInfo, StartProgress
from backend.http.calls import Calls
from backend.http.checks import AnswerChecker
from backend.http.completions import Completions
from backend.http.engine_port import Engine
from backend.http.middleware import guard
from backend.http.operations import Operations
from backend.http.prompts import PromptEncoder
from backend.http.state import ReplicaState
from backend.metrics import ReplicaMetrics
from backend.recent_usages import RecentUsageLog
from backend.registrar import Registrar
from backend.telemetry import Telemetry, build_telemetry
from backend.text.grammar_compiler import GrammarCompiler
from backend.text.grammar_tokenizer import build_grammar_tokenizer
from backend.text.media import ImageLimits
from backend.text.model_text import ModelTextError, load_model_text
from backend.transfer.metrics import TransferCollector
from backend.transfer.service import TransferService

StartEngine = Callable[[BackendConfig, Callable[[StartProgress], None]], Awaitable[Engine]]

# How long open requests may take to tell their readers that the engine has ended.
_LAST_WORDS_S: Final = 2.0

# How long connections that outlast the grace may take to notice that they were cut off.
_CUT_OFF_S: Final = 0.2

_log = logging.getLogger("backend.server")


class ReplicaStartError(RuntimeError):
    """The replica cannot start; the message is one sentence for people."""


async def start_engine(config: BackendConfig, on_progress: Callable[[StartProgress], None]) -> Engine:
    """Start the real engine, with its progress in the log."""

    def report(progress: StartProgress) -> None:
        percent = round(progress.fraction * 100)
        _log.info("starting", extra={"fields": {"stage": progress.stage, "percent": percent}})
        on_progress(progress)

    return await EngineClient.start(config, report)


def load_prompt_encoder(config: BackendConfig, info: EngineInfo) -> PromptEncoder:
    """Read tokenizer and chat template of the checkpoint. Blocks for a fraction of a second.

    Raises:
        ReplicaStartError: naming the file that is missing or wrong.
    """
    try:
        text = load_model_text(
            Path(config.model.path),
            cache_chars=config.text.encode_cache_chars,
            vocab_size=info.vocab_size,
            adds_default_system=config.text.adds_default_system,
            image_limits=_image_limits(config.text) if info.has_vision else None,
        )
    except ModelTextError as error:
        raise ReplicaStartError(str(error)) from error
    grammars = GrammarCompiler(
        lambda: build_grammar_tokenizer(text, info.eos_token_ids), text.call_marks, config.grammar
    )
    return PromptEncoder(text, grammars, max_inline_chars=config.text.max_inline_chars)


def _image_limits(config: TextConfig) -> ImageLimits:
    return ImageLimits(
        max_bytes=config.max_image_bytes,
        max_pixels=config.max_image_pixels,
        max_tokens=config.max_image_tokens,
    )


class ReplicaServer:
    """The HTTP process of one replica.

    Args:
        config: everything.
        start: starts the engine; tests give one that needs no model.
        telemetry: where traces go; by default what the configuration says.
    """

    def __init__(
        self, config: BackendConfig, *, start: StartEngine = start_engine, telemetry: Telemetry | None = None
    ) -> None:
        self._config = config
        self._start_engine = start
        self._telemetry = telemetry or build_telemetry(config)
        self._state = ReplicaState()
        usages = RecentUsageLog(
            config.replica_id, max_entries=config.max_recent_usages, ttl_s=config.recent_usage_ttl_s
        )
        metrics = ReplicaMetrics(config.model.served_as, self._state.read_stats)
        self._metrics = metrics
        self._calls = Calls(usages, metrics)
        self._checker = AnswerChecker(metrics, max_steps=config.grammar.max_check_steps)
        completions = Completions(config, self._state, self._calls, self._checker, self._telemetry)
        operations = Operations(config, self._state, self._calls, usages, metrics)
        self._runner = web.AppRunner(
            _application(config, completions, operations, metrics),
            handler_cancellation=True,  # a reader that leaves cancels its handler, which stops its sequences
            access_log=None,
            shutdown_timeout=_CUT_OFF_S,
        )
        self._prompts: PromptEncoder | None = None
        self._engine: Engine | None = None
        self._registrar: Registrar | None = None
        self._transfers: TransferService | None = None
        self._stop = asyncio.Event()
        self._is_closed = False

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._runner.addresses[0][1])

    def request_stop(self) -> None:
        """Begin to drain and end; a second call changes nothing."""
        self._state.drain()
        self._stop.set()

    async def listen(self) -> None:
        """Open the port.

        Raises:
            ReplicaStartError: when it is taken.
        """
        await self._runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(self._runner, host, port, reuse_address=True).start()
        except OSError as error:
            await self._runner.cleanup()
            reason = error.strerror or str(error)
            raise ReplicaStartError(
                f"cannot listen on {host}:{port}: {reason}; "
                "free that port, or set replicas.base_port to another"
            ) from error

    async def load(self) -> None:
        """Start the engine and read the tokenizer; the replica is ready afterwards.

        Raises:
            ReplicaStartError: with one sentence that says what is wrong.
        """
        try:
            self._engine = await self._start_engine(self._config, self._state.report)
        except EngineStartError as error:
            raise ReplicaStartError(str(error)) from error
        self._prompts = await asyncio.to_thread(load_prompt_encoder, self._config, self._engine.info)
        self._transfers = await self._start_transfers(self._engine)
        self._state.become_ready(self._engine, self._prompts, self._transfers)
        self._registrar = self._register(self._engine.info)
        _log.info("ready", extra={"fields": {"model": self._config.model.served_as}})

    async def serve(self) -> int:
        """Load, serve until asked to stop or until the engine ends, close; the exit code.

        Raises:
            ReplicaStartError: when it cannot start.
        """
        stopping = asyncio.create_task(self._stop.wait())
        try:
            if not await self._load_unless_stopped(stopping):
                return 0
            return await self._wait_for_end(stopping)
        finally:
            stopping.cancel()
            await self.close()

    async def close(self) -> None:
        """Close the port, end the engine and the thread, send the last spans. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._registrar is not None:
            await self._registrar.stop()
        await self._runner.cleanup()
        await self._calls.wait_settled()
        if self._transfers is not None:
            await self._transfers.close()
        if self._engine is not None:
            await self._engine.close()
        if self._prompts is not None:
            self._prompts.close()
        self._checker.close()
        # The exporters' last call blocks.
        await asyncio.to_thread(self._telemetry.shutdown)

    async def _start_transfers(self, engine: Engine) -> TransferService | None:
        if engine.info.exchange is None:
            return None
        try:
            service = TransferService(self._config, engine, engine.info.exchange)
            await service.start()
        except (OSError, ValueError) as error:
            raise ReplicaStartError(f"transfer: {error}") from error
        model = self._config.model.served_as
        self._metrics.register(TransferCollector(model, service.counters, self._state.read_stats))
        return service

    async def _wait_idle(self) -> None:
        """Until no request is open, here or for another replica that conversations were handed over to."""
        await self._calls.wait_idle()
        if self._transfers is not None and self._transfers.address:
            await asyncio.sleep(self._config.transfer.linger_s)
            await self._transfers.wait_idle()

    def _register(self, info: EngineInfo) -> Registrar | None:
        if not self._config.registration.gateways:
            return None
        num_kv_tokens = info.num_blocks * info.block_size
        registrar = Registrar(self._config, num_kv_tokens=num_kv_tokens, port=self.port)
        registrar.start()
        return registrar

    async def _load_unless_stopped(self, stopping: asyncio.Task[bool]) -> bool:
        """Whether loading came to its end before a stop was asked for."""
        loading = asyncio.create_task(self.load())
        await _first_of(loading, stopping)
        if loading.done():
            await loading
            return True
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        return False

    async def _wait_for_end(self, stopping: asyncio.Task[bool]) -> int:
        assert self._engine is not None
        died = self._engine.died
        await _first_of(died, stopping)
        if not died.done():
            _log.info("draining", extra={"fields": {"num_open": self._calls.num_open}})
            idle = asyncio.create_task(self._wait_idle())
            await _first_of(idle, died, timeout_s=self._config.shutdown_grace_s)
            idle.cancel()
        if not died.done():
            return 0
        self._state.drain()
        death = died.result()
        _log.error("the engine has ended", extra={"fields": {"exit_code": death.exit_code}})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._calls.wait_idle()
        return 1


async def _first_of(*events: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(events, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _application(
    config: BackendConfig, completions: Completions, operations: Operations, metrics: ReplicaMetrics
) -> web.Application:
    app = web.Application(
        middlewares=[guard(config.pool_token, config.max_body_bytes, metrics)],
        client_max_size=config.max_body_bytes,
    )
    app.router.add_post("/v1/chat/completions", completions.handle)
    app.router.add_post("/abort", operations.abort)
    app.router.add_post("/drain", operations.drain)
    app.router.add_post("/resume", operations.resume)
    app.router.add_get("/health", operations.health)
    app.router.add_get("/stats", operations.stats)
    app.router.add_get("/usages", operations.usages)
    app.router.add_get("/metrics", operations.metrics)
    return app
