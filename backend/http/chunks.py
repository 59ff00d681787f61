"""Answers as bytes: ``chat.completion`` and the frames of its stream.

A stream's frames differ only in a few characters, so everything else is encoded once per request and a token
costs one JSON string and a concatenation. ``usage`` is the last key of everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backend.engine.messages import TokenLogprobs
from backend.http.errors import ReplicaError
from backend.http.generation import Delta
from backend.text.parts import CallArguments, CallBegun, CallFailed, ContentText, Part, ReasoningText
from backend.wire import FinishReason, TokenUsage

DONE: Final = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode

# What OpenAI sends for a probability of zero, which JSON has no number for.
_LOWEST_LOGPROB: Final = -9999.0


class ChunkEncoder:
    """The frames of one stream.

    Args:
        completion_id: ``chatcmpl-...``.
        created: UTC epoch seconds.
        model: the catalog id that ran.
        token_bytes: the tokenizer's table, for log probabilities.
    """

    def __init__(self, completion_id: str, created: int, model: str, token_bytes: Sequence[bytes]) -> None:
        same = {"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._opening = b"data: " + _encode(same)[:-1] + b',"choices":['
        self._token_bytes = token_bytes
        self._begun: dict[int, bytes] = {}

    def delta(self, delta: Delta) -> bytes:
        """The frames of one delta: nothing at all while its text is held back."""
        frames = b""
        opening = self._begun.get(delta.index)
        if opening is None:
            opening = self._begun[delta.index] = self._opening + b'{"index":%d,"delta":' % delta.index
            frames = opening + _ROLE
        if delta.text:
            if delta.logprobs:
                logprobs = _encode(logprobs_content(delta.logprobs, self._token_bytes))
                frames += b'%b{"content":%b},"logprobs":%b,%b' % (
                    opening, _encode(delta.text), logprobs, _UNFINISHED,
                )  # fmt: skip
            else:
                frames += opening + b'{"content":' + _encode(delta.text) + _PLAIN_END
        if delta.parts:
            frames += self._parts(opening, delta)
        if delta.finish_reason is not None:
            left = b"null"
            if delta.logprobs and not delta.text and not delta.parts:
                left = _encode(logprobs_content(delta.logprobs, self._token_bytes))
            frames += b'%b{},"logprobs":%b,"finish_reason":"%b"}],"usage":null}\n\n' % (
                opening, left, delta.finish_reason.encode(),
            )  # fmt: skip
        return frames

    def _parts(self, opening: bytes, delta: Delta) -> bytes:
        """A frame for each part; the first has all log probabilities."""
        frames = b""
        logprobs = b"null"
        if delta.logprobs:
            logprobs = _encode(logprobs_content(delta.logprobs, self._token_bytes))
        for part in delta.parts:
            frames += b'%b%b,"logprobs":%b,%b' % (opening, _encode_part(part), logprobs, _UNFINISHED)
            logprobs = b"null"
        return frames

    def end(self, usage: TokenUsage) -> bytes:
        """The one authoritative usage, and the end of the stream."""
        return self._opening + b'],"usage":' + _encode(usage) + b"}\n\n" + DONE


_UNFINISHED: Final = b'"finish_reason":null}],"usage":null}\n\n'
_PLAIN_END: Final = b'},"logprobs":null,' + _UNFINISHED
_ROLE: Final = b'{"role":"assistant","content":""},"logprobs":null,' + _UNFINISHED


def _encode_part(part: Part) -> bytes:
    """The ``delta`` object of one part."""
    if isinstance(part, ContentText):
        return b'{"content":' + _encode(part.text) + b"}"
    if isinstance(part, ReasoningText):
        # Clients read one name or the other.
        text = _encode(part.text)
        return b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
    if isinstance(part, CallArguments):
        return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (part.index, _encode(part.text))
    if isinstance(part, CallBegun):
        return _encode({"tool_calls": [{"index": part.index, **_call(part, "")}]})
    return _encode({"tool_call_errors": [_failure(part)]})


def _call(begun: CallBegun, arguments: str) -> dict[str, Any]:
    return {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": arguments}}


def _failure(failed: CallFailed) -> dict[str, Any]:
    """An extension of the OpenAI form: what is wrong with a call, or all that was said of one."""
    failure: dict[str, Any] = {"index": failed.index, "code": failed.code, "message": failed.message}
    if failed.index is None:
        failure |= {"id": failed.said_id, "arguments": failed.said_arguments}
    return failure


def error_frame(error: ReplicaError) -> bytes:
    """What ends a stream that went wrong; no ``[DONE]`` follows."""
    return b"data: " + error.encode() + b"\n\n"


class Message:
    """One choice of a whole answer, gathered from its deltas."""

    __slots__ = (
        "_arguments",
        "_begun",
        "_failures",
        "_problem",
        "_reasoning",
        "_texts",
        "finish_reason",
        "logprobs",
    )

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._begun: list[CallBegun] = []
        self._arguments: list[list[str]] = []
        self._failures: list[dict[str, Any]] = []
        self._problem = ""
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason = "abort"

    def add(self, delta: Delta) -> None:
        if delta.text:
            self._texts.append(delta.text)
        for part in delta.parts:
            self._add_part(part)
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason

    @property
    def content(self) -> str:
        """Everything that was said to the reader."""
        return "".join(self._texts)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each call."""
        named = zip(self._begun, self._arguments, strict=True)
        return [(begun.name, "".join(arguments)) for begun, arguments in named]

    def has_failed(self, index: int) -> bool:
        """Whether something is said to be wrong with a call already."""
        return any(failure["index"] == index for failure in self._failures)

    def declare(self, problem: str, call_index: int | None) -> None:
        """Say that the answer, or the arguments of one of its calls, does not meet its schema."""
        self.finish_reason = "error"
        if call_index is None:
            self._problem = problem
        else:
            self._failures.append({"index": call_index, "code": "schema_not_met", "message": problem})

    def as_json(self) -> dict[str, Any]:
        """The ``message`` object: ``content`` is a string, or null when calls are all that was said."""
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = "".join(self._texts) if self._texts or not self._begun else None
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._begun:
            calls = zip(self._begun, self._arguments, strict=True)
            message["tool_calls"] = [_call(begun, "".join(arguments)) for begun, arguments in calls]
        if self._failures:
            message["tool_call_errors"] = self._failures
        if self._problem:
            message["response_format_error"] = {"code": "schema_not_met", "message": self._problem}
        message["refusal"] = None
        return message

    def _add_part(self, part: Part) -> None:
        if isinstance(part, ContentText):
            self._texts.append(part.text)
        elif isinstance(part, ReasoningText):
            self._reasoning.append(part.text)
        elif isinstance(part, CallBegun):
            self._begun.append(part)
            self._arguments.append([])
        elif isinstance(part, CallArguments):
            self._arguments[part.index].append(part.text)
        else:
            self._failures.append(_failure(part))


def encode_completion(
    completion_id: str,
    created: int,
    model: str,
    messages: Sequence[Message],
    usage: TokenUsage,
    *,
    token_bytes: Sequence[bytes],
    has_logprobs: bool,
) -> bytes:
    """A whole answer. ``usage`` comes last."""
    choices = [
        {
            "index": index,
            "message": message.as_json(),
            "logprobs": logprobs_content(message.logprobs, token_bytes) if has_logprobs else None,
            "finish_reason": message.finish_reason,
        }
        for index, message in enumerate(messages)
    ]
    return _encode(
        {
            "id": completion_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": choices,
            "usage": usage,
        }
    )


def logprobs_content(logprobs: Sequence[TokenLogprobs], token_bytes: Sequence[bytes]) -> dict[str, Any]:
    """Log probabilities in the OpenAI form."""
    return {
        "content": [
            {
                **_token(entry.token_id, entry.logprob, token_bytes),
                "top_logprobs": [_token(token_id, logprob, token_bytes) for token_id, logprob in entry.top],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def _token(token_id: int, logprob: float, token_bytes: Sequence[bytes]) -> dict[str, Any]:
    raw = token_bytes[token_id]
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, _LOWEST_LOGPROB),
        "bytes": list(raw),
    }
