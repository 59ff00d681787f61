"""The OpenAI chat-completions form: what a client may send, and the ends of answers.

A body is decoded once. Unknown fields are ignored; a known field with a wrong value, or one that cannot be
honoured, is refused by name. ``messages`` stay plain data, because the chat template reads them as they are.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from backend.wire import CHAT_PATH, TokenUsage
from gateway.errors import Reason, Refusal, bad_input
from gateway.wire.allowed_tools import narrowed
from gateway.wire.answer_form import AnswerForm
from gateway.wire.image_parts import with_image
from gateway.wire.messages import check_message
from gateway.wire.workers_ai import RunOptions

DONE_FRAME = b"data: [DONE]\n\n"

_ABSENT = (b"", b"null")
_NOT_SENT = msgspec.Raw()
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9.-]{1,30}:")
_ALLOWED_TOOLS = "allowed_tools"
_TOOL_CHOICES = ("none", "auto", "required")
_MAX_CHOICES = 128
_MAX_LOGIT_BIAS = 1024
_MAX_METADATA = 16

Byte = Annotated[int, Meta(ge=0, le=255)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``json_schema`` is a bare schema, or the OpenAI form ``{name, schema, strict}``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request body. Every field may also be null, which means the default; only a null
    ``reasoning_effort`` is a value of its own: no reasoning.
    """

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    image: str | list[Byte] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    n: Annotated[int, Meta(ge=1, le=_MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    metadata: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | msgspec.UnsetType | None = msgspec.UNSET
    thinking: dict[str, Any] | bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    options: RunOptions | None = None
    requests: msgspec.Raw = _NOT_SENT
    request_id: msgspec.Raw = _NOT_SENT


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: what :class:`ChatBody` means, with only what later steps decide upon pulled
    out.
    """

    body: ChatBody
    model: str
    messages: list[dict[str, Any]]
    stop: list[str]
    max_tokens: int | None
    num_choices: int
    is_stream: bool
    includes_usage: bool
    rejects_if_busy: bool
    answer_form: AnswerForm | None = None
    replica_path: str = CHAT_PATH

    @property
    def options(self) -> RunOptions | None:
        return self.body.options

    @property
    def prompt_cache_key(self) -> str | None:
        return self.body.prompt_cache_key


class _NeuronUsage(msgspec.Struct, frozen=True):
    """Usage as clients see it: the engine's counts, and what they cost in neurons."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: msgspec.Struct
    completion_tokens_details: msgspec.Struct
    neurons: float


class _WithUsage(msgspec.Struct, frozen=True):
    usage: msgspec.Raw = _NOT_SENT


class _StreamError(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: str
    param: None = None


_body_decoder = msgspec.json.Decoder(ChatBody)
_usage_decoder = msgspec.json.Decoder(_WithUsage)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_chat(raw: bytes, *, path_model: str | None, allows_prompt: bool, max_choices: int) -> ChatRequest:
    """Decode and check a request body.

    Args:
        raw: the body.
        path_model: the model that the path names; it wins over the body's.
        allows_prompt: whether ``{"prompt": "..."}`` may stand in for messages.
        max_choices: most choices (``n``) that one request may ask for here.

    Raises:
        Refusal: 400, naming the one wrong field.
    """
    if not raw:
        raise Refusal(Reason.MISSING_BODY, "Request is missing headers or body: body")
    try:
        body = _body_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain_decoding(error) from error
    model = path_model or body.model
    if not model:
        raise bad_input("/model", "is required")
    messages = _messages_of(body, allows_prompt)
    if body.image:
        messages = _with_image(messages, body.image, allows_prompt)
    _check_choices(body, max_choices)
    _check_tools(body)
    _check_response_format(body)
    _check_unsupported(body)
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == _ALLOWED_TOOLS:
        tools, mode = narrowed(body.tool_choice, body.tools or [])
        body = msgspec.structs.replace(body, tools=tools, tool_choice=mode)
    stream_options = body.stream_options
    return ChatRequest(
        body=body,
        model=model,
        messages=messages,
        stop=_stop_of(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_choices=body.n or 1,
        is_stream=bool(body.stream),
        includes_usage=bool(stream_options and stream_options.include_usage),
        rejects_if_busy=bool(body.options and body.options.reject_if_busy),
    )


def _messages_of(body: ChatBody, allows_prompt: bool) -> list[dict[str, Any]]:
    if body.requests is not _NOT_SENT or body.request_id is not _NOT_SENT:
        for pointer, value in (("/requests", body.requests), ("/request_id", body.request_id)):
            if bytes(value) not in _ABSENT:
                problem = "asynchronous batches are not available here; send one request with 'messages'"
                raise bad_input(pointer, problem)
    if body.messages is None:
        if allows_prompt and body.prompt:
            return [{"role": "user", "content": body.prompt}]
        raise bad_input("/messages", "is required")
    if allows_prompt and body.prompt:
        raise bad_input("/prompt", "cannot be given together with 'messages'")
    if not body.messages:
        raise bad_input("/messages", "must hold at least one message")
    for index, message in enumerate(body.messages):
        check_message(index, message)
    return body.messages


def _with_image(
    messages: list[dict[str, Any]], image: str | list[int], is_native: bool
) -> list[dict[str, Any]]:
    """The native form's own field for an image, as the first part of what the user said last."""
    if not is_native:
        raise bad_input("/image", "belongs to /ai/run; here images are 'image_url' parts of messages")
    if not isinstance(image, str):
        url = f"data:;base64,{binascii.b2a_base64(bytes(image), newline=False).decode()}"
    else:
        url = image if _SCHEME.match(image) else f"data:;base64,{image}"
    changed = with_image(messages, url)
    if changed is None:
        raise bad_input("/image", "there is no message of a user that it could belong to")
    return changed


def _check_choices(body: ChatBody, max_choices: int) -> None:
    if body.n is not None and body.n > max_choices:
        raise bad_input("/n", f"this gateway serves at most {max_choices} choices per request")
    if body.top_logprobs and not body.logprobs:
        raise bad_input("/top_logprobs", "needs 'logprobs': true")
    if body.logit_bias:
        if len(body.logit_bias) > _MAX_LOGIT_BIAS:
            raise bad_input("/logit_bias", f"must have at most {_MAX_LOGIT_BIAS} entries")
        for token in body.logit_bias:
            if not (token.isascii() and token.isdigit()):
                raise bad_input("/logit_bias", "keys must be token ids")


def _check_tools(body: ChatBody) -> None:
    """Check the tools that may be called; whether the model can call any, its replica knows."""
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in _TOOL_CHOICES:
        raise bad_input("/tool_choice", f"must be one of {', '.join(_TOOL_CHOICES)} or a named function")
    if choice not in (None, "none", "auto") and not body.tools:
        raise bad_input("/tool_choice", "asks for a tool call, but there are no tools")
    names: set[str] = set()
    for index, tool in enumerate(body.tools or ()):
        _check_tool(f"/tools/{index}", tool, names)
    if isinstance(choice, dict) and choice.get("type") != _ALLOWED_TOOLS:
        _check_named_tool(choice, names)


def _check_named_tool(choice: dict[str, Any], names: set[str]) -> None:
    if choice.get("type") != "function":
        raise bad_input("/tool_choice/type", "must be 'function' or 'allowed_tools'")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_input("/tool_choice/function/name", "must be a string")
    if name not in names:
        raise bad_input("/tool_choice/function/name", "is the name of none of the tools")


def _check_tool(pointer: str, tool: dict[str, Any], names: set[str]) -> None:
    if tool.get("type") != "function":
        raise bad_input(f"{pointer}/type", "must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_input(f"{pointer}/function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise bad_input(f"{pointer}/function/name", "must be a string that is not empty")
    if name in names:
        raise bad_input(f"{pointer}/function/name", "is the name of another tool already")
    names.add(name)
    if not isinstance(function.get("description"), str | None):
        raise bad_input(f"{pointer}/function/description", "must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise bad_input(f"{pointer}/function/parameters", "must be a JSON schema")
    if not isinstance(function.get("strict"), bool | None):
        raise bad_input(f"{pointer}/function/strict", "must be true or false")


def _check_response_format(body: ChatBody) -> None:
    """Check what can be seen without reading the schema; whether it can be met, the replica finds out."""
    wanted = body.response_format
    if wanted is None or wanted.type != "json_schema":
        return
    pointer = "/response_format/json_schema"
    given = wanted.json_schema
    if given is None:
        raise bad_input(pointer, "is required for type 'json_schema'")
    if "schema" in given:
        if not isinstance(given["schema"], dict | bool):
            raise bad_input(f"{pointer}/schema", "must be a JSON schema")
    elif isinstance(given.get("name"), str):  # no keyword of a schema, but the name of one
        raise bad_input(f"{pointer}/schema", "is required")


def _check_unsupported(body: ChatBody) -> None:
    """Refuse what cannot be honoured: an answer that silently ignores it would be wrong."""
    if body.functions and body.function_call != "none":
        raise bad_input("/functions", "is deprecated and not supported: send 'tools'")
    if body.modalities and body.modalities != ["text"]:
        raise bad_input("/modalities", "this model answers with text only")
    if body.audio is not None:
        raise bad_input("/audio", "this model answers with text only")
    if body.web_search_options is not None:
        raise bad_input("/web_search_options", "there is no web search here; offer it as a tool")
    if body.verbosity not in (None, "medium"):
        raise bad_input("/verbosity", "is not supported; ask for it in a message")
    if body.metadata is not None and len(body.metadata) > _MAX_METADATA:
        raise bad_input("/metadata", f"must have at most {_MAX_METADATA} entries")


def _stop_of(body: ChatBody) -> list[str]:
    stop = body.stop
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > 4:
        raise bad_input("/stop", "must be a string or at most 4 strings")
    if not all(strings):
        raise bad_input("/stop", "must not hold an empty string")
    return strings


_AT = re.compile(r"^(?P<problem>.*?) - at `(?P<path>\$.*)`$", re.DOTALL)
_AT_KEY = re.compile(r"^(?P<problem>.*?) - at `key` in `(?P<path>\$.*)`$", re.DOTALL)


def explain_decoding(error: Exception) -> Refusal:
    """A decoding error as a refusal that names the field."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return Refusal(Reason.BAD_INPUT, f"Bad input: the body is not valid JSON: {text}")
    found = _AT_KEY.match(text) or _AT.match(text)
    if found is None:
        return bad_input("/", f"{text[:1].lower()}{text[1:]}")
    pointer = found["path"][1:].replace("[...]", "").replace(".", "/").replace("[", "/").replace("]", "")
    problem = found["problem"]
    return bad_input(pointer or "/", f"{problem[:1].lower()}{problem[1:]}".replace("`", ""))


def encode_usage(usage: TokenUsage, neurons_e4: int) -> bytes:
    """The authoritative ``usage`` object, with ``neurons`` to four decimals."""
    return msgspec.json.encode(
        _NeuronUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            usage.prompt_tokens_details,
            usage.completion_tokens_details,
            neurons_e4 / 10_000,
        )
    )


def with_usage(completion: bytes, usage: bytes) -> bytes:
    """An encoded completion or chunk with its ``usage`` replaced; nothing else in it is looked at.

    Raises:
        msgspec.DecodeError: when ``completion`` is no JSON object.
    """
    members = _object_decoder.decode(completion)
    members["usage"] = msgspec.Raw(usage)
    return msgspec.json.encode(members)


def usage_of(completion: bytes) -> msgspec.Raw | None:
    """The raw ``usage`` of an encoded completion, or None. Raises msgspec.DecodeError."""
    usage = _usage_decoder.decode(completion).usage
    return None if usage is _NOT_SENT else usage


def frame(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_frame(code: str, message: str) -> bytes:
    """The event that ends a stream which cannot be completed; no ``[DONE]`` follows it."""
    return frame(msgspec.json.encode({"error": _StreamError(message, "server_error", code)}))


def encode_model_list(models: Sequence[tuple[str, str]], created: int) -> bytes:
    """An OpenAI model list of (id, owner)."""
    data = [
        {"id": model, "object": "model", "created": created, "owned_by": owner} for model, owner in models
    ]
    return msgspec.json.encode({"object": "list", "data": data})
