"""One question to a chat endpoint, whole or streamed, and everything about how its answer came."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_FINISHES = frozenset({"stop", "length", "tool_calls", "content_filter"})


@dataclass
class Reply:
    """An answer as a client puts it together.

    ``calls`` are [id, name, arguments]. ``flaws`` say what a client would stumble over in a stream.
    """

    status: int = 0
    content: str | None = None
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    flaws: list[str] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    def is_cut(self, max_tokens: int) -> bool:
        """Whether the budget ended the answer."""
        return self.finish_reason == "length" or self.completion_tokens >= max_tokens

    def said(self) -> tuple[Any, ...]:
        """What must be the same however it was delivered; ids may differ."""
        calls = [(name, arguments) for _, name, arguments in self.calls]
        counts = (self.usage.get("prompt_tokens"), self.usage.get("completion_tokens"))
        return self.content or "", self.reasoning, calls, self.finish_reason, counts

    def inconsistency(self, max_tokens: int) -> str:
        """What of the finish reason contradicts the answer, or nothing."""
        if self.finish_reason not in _FINISHES:
            return f"finish_reason is {self.finish_reason!r}"
        if bool(self.calls) != (self.finish_reason == "tool_calls"):
            return f"finish_reason {self.finish_reason!r} with {len(self.calls)} calls"
        if self.finish_reason == "length" and self.completion_tokens < max_tokens:
            return f"finish_reason 'length' after {self.completion_tokens} of {max_tokens} tokens"
        if self.completion_tokens > max_tokens:
            return f"{self.completion_tokens} tokens where {max_tokens} were allowed"
        if self.content is None and not self.calls:
            return "content is null and there are no calls"
        return ""


class Endpoint:
    """A chat completions endpoint of the OpenAI form.

    Args:
        session: with the authorization among its headers.
        url: ends where ``/chat/completions`` begins.
        model: asked for.
        timeout_s: of one answer.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, timeout_s: float) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def ask(self, body: dict[str, Any]) -> Reply:
        """Ask; what goes wrong with the connection is the reply's ``error``."""
        body = {"model": self._model, **body}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        reply = Reply()
        try:
            async with self._session.post(self._url, json=body, timeout=self._timeout) as response:
                reply.status = response.status
                if response.status != 200:
                    reply.error = (await response.text())[:500]
                elif body.get("stream"):
                    await _read_stream(response, reply)
                else:
                    _read_whole(await response.json(), reply)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            reply.error = repr(error)
        return reply


def _read_whole(body: dict[str, Any], reply: Reply) -> None:
    choice = body["choices"][0]
    message = choice["message"]
    reply.content = message["content"]
    reply.reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    reply.finish_reason = choice["finish_reason"]
    reply.usage = body["usage"]
    for call in message.get("tool_calls") or ():
        reply.calls.append([call["id"], call["function"]["name"], call["function"]["arguments"]])


async def _read_stream(response: aiohttp.ClientResponse, reply: Reply) -> None:
    reader = StreamReader(reply)
    async for line in response.content:
        reader.read(line)
    reader.end()


class StreamReader:
    """Puts the frames of a stream together, and notes what no client should have to bear."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._is_done = False
        self._has_content = False

    def read(self, line: bytes) -> None:
        """Take one line of the response."""
        line = line.strip()
        if not line or line.startswith(b":"):
            return
        if not line.startswith(b"data:"):
            self._flaw("a line that is no data")
            return
        data = line[5:].strip()
        if self._is_done:
            self._flaw("something after [DONE]")
        if data == b"[DONE]":
            self._is_done = True
            return
        frame = json.loads(data)
        if "error" in frame:
            self._reply.error = str(frame["error"])[:500]
            return
        self._read_frame(frame)

    def end(self) -> None:
        """The response is over."""
        reply = self._reply
        if not self._is_done:
            self._flaw("no [DONE]")
        if reply.finish_reason is None:
            self._flaw("no finish_reason")
        if not reply.usage:
            self._flaw("no usage")
        if not self._has_content and reply.calls:
            reply.content = None

    def _read_frame(self, frame: dict[str, Any]) -> None:
        reply = self._reply
        if "choices" not in frame:
            self._flaw("a frame without choices")
        for choice in frame.get("choices", ()):
            if reply.finish_reason is not None:
                self._flaw("a choice after its finish_reason")
            self._read_delta(choice["delta"])
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        if frame.get("usage"):
            if reply.usage:
                self._flaw("more than one usage")
            reply.usage = frame["usage"]

    def _read_delta(self, delta: dict[str, Any]) -> None:
        reply = self._reply
        content = delta.get("content")
        if content is not None:
            if not isinstance(content, str):
                self._flaw("content that is no string")
                return
            self._has_content = self._has_content or bool(content)
            reply.content = (reply.content or "") + content
        reply.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for part in delta.get("tool_calls") or ():
            self._read_call(part)

    def _read_call(self, part: dict[str, Any]) -> None:
        calls, index, function = self._reply.calls, part.get("index"), part.get("function") or {}
        if index == len(calls):
            if not (part.get("id") and part.get("type") == "function" and function.get("name")):
                self._flaw("a call that begins without id, type or name")
            calls.append([part.get("id") or "", function.get("name") or "", function.get("arguments") or ""])
        elif not isinstance(index, int) or not 0 <= index < len(calls):
            self._flaw("a call whose index is not the next")
        else:
            if part.get("id") or function.get("name"):
                self._flaw("id or name in a later delta of a call")
            if not function.get("arguments"):
                self._flaw("an empty delta of a call")
            calls[index][2] += function.get("arguments") or ""

    def _flaw(self, what: str) -> None:
        if what not in self._reply.flaws:
            self._reply.flaws.append(what)
