"""One replica of an embedding model as an HTTP server, on the same internal wire as the others.

It listens before the model is loaded, drains on the first SIGTERM, and remembers the ends of its requests for
a gateway that was killed. See :mod:`backend.wire` for the routes; a request is aborted by dropping the inputs
that are not being computed yet.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
import uvloop
from aiohttp import web

from backend.embeddings.answers import encode_embeddings
from backend.embeddings.batcher import Batcher
from backend.embeddings.bert import BertError
from backend.embeddings.config import EmbeddingReplicaConfig
from backend.embeddings.encoder import Encoder
from backend.embeddings.jobs import Jobs
from backend.embeddings.operations import EmbeddingOperations, EmbeddingState
from backend.embeddings.requests import check_request, decode_request, token_inputs
from backend.http.middleware import guard
from backend.metrics import ReplicaMetrics
from backend.recent_usages import RecentUsageLog
from backend.telemetry import configure_logging
from backend.wire import EMBEDDINGS_PATH

_CUT_OFF_S: Final = 0.2
_DEFAULT_POOLING: Final = "mean"

_log = logging.getLogger("backend.embeddings")


class EmbeddingServer:
    """Listens, loads, serves, drains. Made and used inside a running event loop."""

    def __init__(self, config: EmbeddingReplicaConfig) -> None:
        self._config = config
        self._state = EmbeddingState()
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._computing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embed")
        usages = RecentUsageLog(
            config.replica_id, max_entries=config.max_recent_usages, ttl_s=config.recent_usage_ttl_s
        )
        self._metrics = ReplicaMetrics(config.served_as, self._state.read_stats)
        self._jobs = Jobs(usages, self._metrics)
        operations = EmbeddingOperations(config, self._state, self._jobs, usages, self._metrics)
        app = web.Application(
            middlewares=[guard(config.pool_token, config.max_body_bytes, self._metrics)],
            client_max_size=config.max_body_bytes,
        )
        app.router.add_post(EMBEDDINGS_PATH, self.embed)
        operations.add_to(app.router)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_CUT_OFF_S
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._runner.addresses[0][1])

    async def listen(self) -> None:
        """Open the port. Raises OSError when it is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._config.host, self._config.port, reuse_address=True).start()

    async def load(self) -> None:
        """Read the model; the replica is ready afterwards. Raises BertError."""
        config = self._config
        loop = asyncio.get_running_loop()
        encoder = await loop.run_in_executor(self._computing, self._load)
        batcher = Batcher(
            encoder.embed,
            self._computing,
            max_batch_tokens=config.max_batch_tokens,
            max_waiting_inputs=config.max_waiting_inputs,
            max_queue_wait_s=config.max_queue_wait_s,
        )
        self._state.become_ready(encoder, batcher)
        _log.info("ready", extra={"fields": {"model": config.served_as}})

    async def drain(self) -> None:
        """Take no more requests, and wait for those in progress within the grace."""
        self._state.drain()
        try:
            async with asyncio.timeout(self._config.shutdown_grace_s):
                await self._jobs.wait_idle()
        except TimeoutError:
            _log.warning("requests were cut off", extra={"fields": {"num_open": self._jobs.num_open}})

    async def close(self) -> None:
        """Close the port and end the threads."""
        await self._runner.cleanup()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self._computing.shutdown(wait=False, cancel_futures=True)

    async def embed(self, http: web.Request) -> web.Response:
        """``POST /v1/embeddings``. Raises ReplicaError."""
        encoder, batcher = self._state.serving()
        request = decode_request(await http.read())
        check_request(request, encoder.dimensions)
        loop = asyncio.get_running_loop()
        inputs = await loop.run_in_executor(self._tokenizing, token_inputs, request, encoder)
        pooling = request.pooling or _DEFAULT_POOLING
        async with self._jobs.open(request, inputs, pooling) as job:
            await batcher.run(job, rejects_if_busy=request.reject_if_busy)
            vectors = [vector for vector in job.vectors if vector is not None]
            body = await loop.run_in_executor(
                self._tokenizing,
                lambda: encode_embeddings(
                    vectors,
                    model=request.model,
                    pooling=pooling,
                    encoding_format=request.encoding_format,
                    num_tokens=job.num_computed_tokens,
                ),
            )
        return web.Response(body=body, content_type="application/json")

    def _load(self) -> Encoder:
        torch.set_num_threads(self._config.threads)
        return Encoder(Path(self._config.model_path), max_model_len=self._config.max_model_len)


def run(config: EmbeddingReplicaConfig) -> int:
    """Run one replica in this process until it is stopped; the exit code, 1 when it cannot start."""
    configure_logging(config.replica_id, config.log_level)
    try:
        uvloop.run(_serve(config))
    except (BertError, OSError) as error:
        sys.stderr.write(f"replica {config.replica_id}: {error}\n")
        return 1
    return 0


async def _serve(config: EmbeddingReplicaConfig) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = EmbeddingServer(config)
    try:
        await server.listen()
        await server.load()
        await stopping.wait()
        await server.drain()
    finally:
        await server.close()
