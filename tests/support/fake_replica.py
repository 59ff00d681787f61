"""A replica of the internal wire that does what a script says: streams, stalls, dies, refuses."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from backend.wire import (
    AbortRequest,
    AbortResult,
    CachedBlocks,
    ErrorBody,
    ErrorDetail,
    Health,
    RecentUsage,
    RecentUsages,
    TokenUsage,
)


@dataclass
class Script:
    """What happens to the next requests. Counts are of content chunks; None means never."""

    tokens: list[str] = field(default_factory=lambda: ["Hello", ",", " world"])
    prompt_tokens: int = 12
    cached_tokens: int = 4
    cached_head: str = ""
    finish_reason: str = "stop"
    status: int = 200
    error: ErrorDetail | None = None
    token_delay_s: float = 0.0
    die_before_head: bool = False
    die_after: int | None = None
    end_early_after: int | None = None
    stall_after: int | None = None
    error_frame_after: int | None = None
    error_code: str = "engine_error"
    abort_delay_s: float = 0.02
    forgets_usage: bool = False
    drops_usage: bool = False


class FakeReplica:
    """One replica on a port of its own. ``requests`` holds what it received, ``headers`` beside it."""

    def __init__(self, replica_id: str) -> None:
        self.id = replica_id
        self.script = Script()
        self.health: str = "ready"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.usages: list[RecentUsage] = []
        self.aborts: list[str] = []
        self.disconnects: list[tuple[str, float]] = []
        self.started_at = time.time()
        self._runner: web.AppRunner | None = None
        self.port = 0
        self._generated: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/abort", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/usages", self._usages)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- routes ------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        script = self.script
        if script.die_before_head:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if script.status != 200:
            detail = script.error or ErrorDetail(message="refused", code="queue_full")
            return web.Response(
                status=script.status,
                body=msgspec.json.encode(ErrorBody(detail)),
                content_type="application/json",
            )
        self._generated[body["request_id"]] = 0
        try:
            if body.get("stream"):
                return await self._stream(request, body, script)
            return await self._complete(request, body, script)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnects.append((body["request_id"], time.monotonic()))
            self._remember(body, script, "abort")
            raise

    async def _complete(self, request: web.Request, body: dict[str, Any], script: Script) -> web.Response:
        for index, _ in enumerate(script.tokens):
            if script.die_after == index:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            await asyncio.sleep(script.token_delay_s)
            self._generated[body["request_id"]] += 1
        completion = {
            "id": f"chatcmpl-{body['request_id']}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "".join(script.tokens)},
                    "logprobs": None,
                    "finish_reason": script.finish_reason,
                }
            ],
            "usage": self._usage(body, script),
        }
        self._remember(body, script, "stop")
        return web.Response(body=msgspec.json.encode(completion), content_type="application/json")

    async def _stream(self, request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        sent_role = False
        for index, token in enumerate(script.tokens):
            if script.die_after == index:
                assert request.transport is not None
                request.transport.abort()
                return response
            if script.end_early_after == index:
                return response
            if script.stall_after == index:
                await asyncio.sleep(3600)
            if script.error_frame_after == index:
                detail = ErrorDetail(message="the engine failed", type="server_error", code=script.error_code)
                await response.write(b"data: " + msgspec.json.encode(ErrorBody(detail)) + b"\n\n")
                return response
            await asyncio.sleep(script.token_delay_s)
            if not sent_role:
                sent_role = True
                await response.write(self._chunk(body, {"role": "assistant", "content": ""}))
            await response.write(self._chunk(body, {"content": token}))
            self._generated[body["request_id"]] += 1
        await response.write(self._chunk(body, {}, script.finish_reason))
        self._remember(body, script, "stop")
        if not script.drops_usage:
            final = self._head(body) | {"choices": [], "usage": self._usage(body, script)}
            await response.write(b"data: " + msgspec.json.encode(final) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _embed(self, request: web.Request) -> web.Response:
        """Two dimensions: the length of a text, and its number."""
        body = await request.json()
        self.requests.append(body)
        script = self.script
        if script.status != 200:
            detail = script.error or ErrorDetail(message="refused", code="queue_full")
            return web.Response(status=script.status, body=msgspec.json.encode(ErrorBody(detail)))
        is_base64 = body.get("encoding_format") == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": "AACAPwAAAAA=" if is_base64 else [float(len(text)), float(index)],
            }
            for index, text in enumerate(body["inputs"])
        ]
        self._generated[body["request_id"]] = 0
        self._remember(body, script, "stop")
        usage = TokenUsage.of(prompt=script.prompt_tokens, completion=0)
        answer = {
            "object": "list",
            "data": data,
            "model": body["model"],
            "dimensions": 2,
            "pooling": body.get("pooling", "mean"),
            "usage": usage,
        }
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _abort(self, request: web.Request) -> web.Response:
        request_id = msgspec.json.decode(await request.read(), type=AbortRequest).request_id
        self.aborts.append(request_id)
        await asyncio.sleep(self.script.abort_delay_s)  # the disconnect may be seen a moment after the abort
        found = None if self.script.forgets_usage else self._find(request_id)
        return web.Response(body=msgspec.json.encode(AbortResult(request_id=request_id, usage=found)))

    async def _health(self, request: web.Request) -> web.Response:
        body = msgspec.json.encode(Health(status=self.health, replica_id=self.id))  # type: ignore[arg-type]
        return web.Response(status=200 if self.health == "ready" else 503, body=body)

    async def _usages(self, request: web.Request) -> web.Response:
        after = int(request.query.get("after", "0"))
        usages = [usage for usage in self.usages if usage.sequence > after]
        if (request_id := request.query.get("request_id")) is not None:
            found = None if self.script.forgets_usage else self._find(request_id)
            usages = [] if found is None else [found]
        body = RecentUsages(
            replica_id=self.id, started_at=self.started_at, usages=usages, next_after=len(self.usages)
        )
        return web.Response(body=msgspec.json.encode(body))

    # -- parts ------------------------------------------------------------------------------------------

    def _find(self, request_id: str) -> RecentUsage | None:
        return next((usage for usage in self.usages if usage.request_id == request_id), None)

    def _remember(self, body: dict[str, Any], script: Script, finish: str) -> None:
        self.usages.append(
            RecentUsage(
                sequence=len(self.usages) + 1,
                request_id=body["request_id"],
                billing_context=body.get("billing_context", ""),
                usage=TokenUsage.of(
                    prompt=script.prompt_tokens,
                    cached=script.cached_tokens,
                    completion=self._generated[body["request_id"]],
                ),
                finish_reason=finish,  # type: ignore[arg-type]
                finished_at=time.time(),
            )
        )

    def _usage(self, body: dict[str, Any], script: Script) -> TokenUsage:
        head = script.cached_head
        return TokenUsage.of(
            prompt=script.prompt_tokens,
            cached=script.cached_tokens,
            completion=len(script.tokens),
            cached_blocks=CachedBlocks(num_blocks=script.cached_tokens // 16, head=head) if head else None,
        )

    @staticmethod
    def _head(body: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{body['request_id']}",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body["model"],
        }

    def _chunk(self, body: dict[str, Any], delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return b"data: " + msgspec.json.encode(self._head(body) | {"choices": [choice]}) + b"\n\n"
