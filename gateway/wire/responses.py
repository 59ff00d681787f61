"""OpenAI's Responses form, stateless: what a client may send, as the chat request that it means.

The items of ``input`` become messages, ``instructions`` the first of them. Nothing is stored here, so
whatever refers to something stored is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.errors import Reason, Refusal, bad_input
from gateway.wire.openai import ChatRequest, NumTokens, ReasoningEffort, decode_chat, explain_decoding
from gateway.wire.responses_answer import Echo, ResponsesAnswer
from gateway.wire.responses_input import Conversation, read_input
from gateway.wire.workers_ai import RunOptions

_INCLUDABLE = frozenset(("reasoning.encrypted_content", "message.output_text.logprobs"))
_LOGPROBS = "message.output_text.logprobs"


class Reasoning(msgspec.Struct, frozen=True):
    """``effort`` null leaves it to the model; summaries are never made: reasoning is given as it is."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class Text(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request body; every field may also be null."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: int | None = None
    options: RunOptions | None = None


_decoder = msgspec.json.Decoder(ResponsesBody)

_FIELDS = (
    ("/max_tokens", "/max_output_tokens"),
    ("/response_format/json_schema", "/text/format"),
    ("/response_format", "/text/format"),
    ("/reasoning_effort", "/reasoning/effort"),
    ("/tool_choice/function", "/tool_choice"),
)


def decode_responses(raw: bytes) -> ChatRequest:
    """Decode and check a request body.

    Raises:
        Refusal: 400, naming the one wrong field.
    """
    if not raw:
        raise Refusal(Reason.MISSING_BODY, "Request is missing headers or body: body")
    try:
        body = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain_decoding(error) from error
    _check_stateless(body)
    _check_supported(body)
    if body.input is None:
        raise bad_input("/input", "is required")
    conversation = read_input(body.instructions, body.input)
    chat = msgspec.json.encode(_chat_of(body, conversation))
    try:
        request = decode_chat(chat, path_model=None, allows_prompt=False, max_choices=1)
    except Refusal as refusal:
        raise in_own_words(refusal, conversation) from None
    return msgspec.structs.replace(request, answer_form=ResponsesAnswer(_echo_of(body)))


def in_own_words(refusal: Refusal, conversation: Conversation | None = None) -> Refusal:
    """A refusal of the chat request as one of the fields that the client sent."""
    message = refusal.message
    for pointer, source in conversation.pointers if conversation else ():
        if message.startswith((f"Bad input: '{pointer}/", f"Bad input: '{pointer}'")):
            return _renamed(refusal, pointer, source)
    if message.startswith("Bad input: '/tools/"):
        return _renamed(refusal, "/function", "")
    for chat_name, own_name in _FIELDS:
        if message.startswith(f"Bad input: '{chat_name}"):
            return _renamed(refusal, chat_name, own_name)
    return refusal


def _renamed(refusal: Refusal, old: str, new: str) -> Refusal:
    return Refusal(
        refusal.reason,
        refusal.message.replace(old, new, 1),
        retry_after_s=refusal.retry_after_s,
        headers=refusal.headers,
    )


def _check_stateless(body: ResponsesBody) -> None:
    if body.store:
        raise bad_input("/store", "responses are not kept here: send false, or leave it out")
    if body.background:
        raise bad_input("/background", "responses are not kept here, so nobody could ask for this one")
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise bad_input(f"/{name}", "nothing is kept here: send the whole conversation in 'input'")


def _check_supported(body: ResponsesBody) -> None:
    if body.truncation == "auto":
        raise bad_input("/truncation", "only 'disabled' is supported: what does not fit is refused")
    if body.max_tool_calls is not None:
        raise bad_input("/max_tool_calls", "tools are called by the client, which can count")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise bad_input("/text/verbosity", "is not supported; ask for it in 'instructions'")
    for index, wanted in enumerate(body.include or ()):
        if wanted not in _INCLUDABLE:
            raise bad_input(f"/include/{index}", f"must be one of {', '.join(sorted(_INCLUDABLE))}")
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function":
            raise bad_input(f"/tools/{index}/type", "must be 'function': there are no built-in tools")
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type") != "function":
        raise bad_input("/tool_choice/type", "must be 'function'")


def _chat_of(body: ResponsesBody, conversation: Conversation) -> dict[str, Any]:
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": conversation.messages,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "prompt_cache_key": body.prompt_cache_key,
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _response_format(body.text),
        "options": body.options,
    }
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
            for tool in body.tools
        ]
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return chat


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: Text | None) -> dict[str, Any] | None:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema is None:
        raise bad_input("/text/format/schema", "is required for type 'json_schema'")
    schema = {"name": wanted.name or "response", "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}


def _echo_of(body: ResponsesBody) -> Echo:
    text = body.text or Text()
    return Echo(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        temperature=body.temperature,
        text={"format": _without_nulls(text.format or TextFormat())},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        user=body.user,
    )


def _without_nulls(wanted: TextFormat) -> dict[str, Any]:
    fields = msgspec.structs.asdict(wanted)
    return {name: value for name, value in fields.items() if value is not None}
