"""OpenAI's legacy completions: a prompt instead of messages, text instead of a message.

As on ``/ai/run``, the prompt is what a user says: chat models continue a conversation, not a text.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.errors import Reason, Refusal, bad_input
from gateway.wire.openai import (
    DONE_FRAME,
    ChatRequest,
    NumTokens,
    Penalty,
    StreamOptions,
    decode_chat,
    error_frame,
    explain_decoding,
    frame,
)
from gateway.wire.workers_ai import RunOptions

_DATA = b"data: "
_CHAT_PREFIX = "chatcmpl-"


class CompletionsBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request body; every field may also be null."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    max_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    options: RunOptions | None = None


class _Said(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int
    message: _Said = _Said()
    delta: _Said = _Said()
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True):
    """A chat completion or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[_Choice]


class _Text(msgspec.Struct, frozen=True):
    text: str
    index: int
    finish_reason: str | None
    logprobs: None = None


class _TextCompletion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Text]
    usage: msgspec.Raw | None


_body_decoder = msgspec.json.Decoder(CompletionsBody)
_completion_decoder = msgspec.json.Decoder(_Completion)

_REFUSED = ("logprobs", "echo", "suffix")
_PASSED_ON = (
    "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed",
    "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", "prompt_cache_key", "options",
)  # fmt: skip


def decode_completions(raw: bytes, *, max_choices: int) -> ChatRequest:
    """Decode and check a request body. Raises Refusal: 400, naming the one wrong field."""
    if not raw:
        raise Refusal(Reason.MISSING_BODY, "Request is missing headers or body: body")
    try:
        body = _body_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain_decoding(error) from error
    for name in _REFUSED:
        if getattr(body, name):
            raise bad_input(f"/{name}", "is not supported here; use chat completions")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_input("/best_of", "must be n: all choices are answered with")
    chat = {name: getattr(body, name) for name in _PASSED_ON}
    chat["messages"] = [{"role": "user", "content": _prompt_of(body.prompt)}]
    request = decode_chat(
        msgspec.json.encode(chat), path_model=None, allows_prompt=False, max_choices=max_choices
    )
    return msgspec.structs.replace(request, answer_form=TextAnswer())


def _prompt_of(prompt: str | list[Any] | None) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise bad_input("/prompt", "must be one text that is not empty; token ids are not supported")
    return prompt


class TextAnswer:
    """See :class:`gateway.wire.answer_form.AnswerForm`."""

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        chat = _completion_decoder.decode(completion)
        texts = [_Text(one.message.content or "", one.index, one.finish_reason) for one in chat.choices]
        return _encode(chat, texts, usage)

    def forward(self, block: bytes) -> bytes:
        frames = []
        for data in block.split(b"\n\n"):
            if data.startswith(_DATA):
                chunk = _completion_decoder.decode(data[len(_DATA) :])
                texts = [
                    _Text(one.delta.content or "", one.index, one.finish_reason)
                    for one in chunk.choices
                    if one.delta.content or one.finish_reason
                ]
                if texts:
                    frames.append(frame(_encode(chunk, texts, None)))
        return b"".join(frames)

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        if not includes_usage:
            return DONE_FRAME
        return frame(_encode(_completion_decoder.decode(final_chunk), [], usage)) + DONE_FRAME

    def failure(self, code: str, message: str) -> bytes:
        return error_frame(code, message)


def _encode(chat: _Completion, texts: list[_Text], usage: bytes | None) -> bytes:
    completion_id = f"cmpl-{chat.id.removeprefix(_CHAT_PREFIX)}"
    raw = None if usage is None else msgspec.Raw(usage)
    return msgspec.json.encode(
        _TextCompletion(completion_id, "text_completion", chat.created, chat.model, texts, raw)
    )
