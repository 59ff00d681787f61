"""A replica server on a free port, in front of an engine that says what a test wrote for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp

from backend.config import BackendConfig
from backend.engine.client import EngineDeath, EngineDiedError, SequenceRefusedError, SequenceStream
from backend.engine.messages import (
    EngineInfo,
    EngineStats,
    SequenceFinish,
    SequenceRequest,
    TokenLogprobs,
    TokenOutput,
)
from backend.server import ReplicaServer
from backend.text.tokenizer import Tokenizer

EOS = 2
INFO = EngineInfo(
    max_model_len=512,
    vocab_size=267,
    eos_token_ids=(EOS,),
    block_size=16,
    num_blocks=64,
    kv_bytes_per_token=1,
    device="none",
    max_running=4,
    max_waiting=4,
)


@dataclass
class Script:
    """What a sequence says: text, then its end."""

    token_ids: list[int]
    finish: SequenceFinish = "stop"
    delay_s: float = 0.0
    refusal: str | None = None
    cached_prompt_tokens: int = 0
    cached_head: bytes = b""
    message: str = ""


class ScriptedEngine:
    """Speaks one script per sequence, in order of submission; the last script goes on for ever."""

    def __init__(self) -> None:
        self.info = INFO
        self.scripts: list[Script] = []
        self.requests: list[SequenceRequest] = []
        self.aborted: list[int] = []
        self.aborted_at: list[float] = []
        self.died: asyncio.Future[EngineDeath] = asyncio.get_running_loop().create_future()
        self.refuses_submit = False
        self.is_closed = False
        self._ids = itertools.count(1)
        self._streams: dict[int, SequenceStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._streams), num_blocks=64, num_free_blocks=40, num_cached_blocks=16,
            prompt_tokens=100, cached_prompt_tokens=32, completion_tokens=7, num_preemptions=3,
            num_requests=2, num_draft_tokens=40, num_right_draft_tokens=30,
        )  # fmt: skip

    def new_sequence_id(self) -> int:
        return next(self._ids)

    def submit(self, request: SequenceRequest) -> SequenceStream:
        if self.refuses_submit:
            raise SequenceRefusedError("queue_full", "no room")
        if self.died.done():
            raise EngineDiedError("gone")
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        stream = SequenceStream(cast(Any, self), request.sequence_id)
        self._streams[request.sequence_id] = stream
        task = asyncio.create_task(self._speak(stream, request, script))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def abort(self, sequence_id: int) -> None:
        if sequence_id not in self._streams:
            return
        self.aborted.append(sequence_id)
        self.aborted_at.append(asyncio.get_running_loop().time())
        stream = self._streams.pop(sequence_id)
        stream._push(
            TokenOutput(
                sequence_id=sequence_id,
                finish_reason="abort",
                cached_prompt_tokens=stream.cached_prompt_tokens,
            )
        )

    def die(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._fail(EngineDiedError("gone"))
        self.died.set_result(EngineDeath(-9, "gone"))

    async def close(self) -> None:
        self.is_closed = True
        for task in self._tasks:
            task.cancel()

    async def _speak(self, stream: SequenceStream, request: SequenceRequest, script: Script) -> None:
        sequence_id = request.sequence_id
        if script.refusal is not None:
            await asyncio.sleep(script.delay_s)
            self._push(stream, TokenOutput(
                sequence_id=sequence_id, finish_reason="error", refusal=cast(Any, script.refusal),
                message="refused",
            ))  # fmt: skip
            return
        token_ids = script.token_ids[: request.sampling.max_tokens]
        finish = script.finish if len(token_ids) == len(script.token_ids) else "length"
        for position, token_id in enumerate(token_ids):
            await asyncio.sleep(script.delay_s)
            is_last = position == len(token_ids) - 1
            top = request.sampling.num_logprobs
            likeliest = [(token_id, -0.25), (5, float("-inf"))]
            self._push(stream, TokenOutput(
                sequence_id=sequence_id,
                token_ids=[token_id],
                finish_reason=finish if is_last else None,
                cached_prompt_tokens=script.cached_prompt_tokens,
                cached_head=b"" if position else script.cached_head,
                logprobs=None if top is None else [TokenLogprobs(token_id, -0.25, likeliest[:top])],
                queue_wait_s=0.001,
                message=script.message,
            ))  # fmt: skip

    def _push(self, stream: SequenceStream, output: TokenOutput) -> None:
        if stream.sequence_id not in self._streams:
            return
        if output.finish_reason is not None:
            del self._streams[stream.sequence_id]
        stream._push(output)


@dataclass
class Answer:
    """One response, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def frames(self) -> list[bytes]:
        assert self.body.endswith(b"\n\n")
        frames = self.body.removesuffix(b"\n\n").split(b"\n\n")
        assert all(frame.startswith(b"data: ") for frame in frames)
        return [frame.removeprefix(b"data: ") for frame in frames]

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(frame) for frame in self.frames if frame != b"[DONE]"]

    def text(self, index: int = 0) -> str:
        return "".join(
            choice["delta"].get("content", "")
            for chunk in self.chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        )


@dataclass
class Replica:
    """A running server with its engine and a client."""

    server: ReplicaServer
    engine: ScriptedEngine
    session: aiohttp.ClientSession
    tokenizer: Tokenizer
    config: BackendConfig
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def say(self, text: str, finish: SequenceFinish = "stop", **script: Any) -> None:
        """Have the next sequence say this."""
        token_ids = self.tokenizer.encode_text(text)
        self.engine.scripts.append(
            Script([*token_ids, EOS] if finish == "stop" else token_ids, finish, **script)
        )

    def request(self, **fields: Any) -> dict[str, Any]:
        return {
            "request_id": f"r{next(self._numbers)}",
            "model": "@cf/test/model",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 100,
            **fields,
        }

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, path, **options) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def complete(self, **fields: Any) -> Answer:
        return await self.call("POST", "/v1/chat/completions", json=self.request(**fields))

    async def usages(self, after: int = 0) -> list[Any]:
        answer = await self.call("GET", f"/usages?after={after}")
        return list(answer.json["usages"])


StartReplica = Callable[..., Awaitable[Replica]]
