"""Answers in OpenAI's Responses form: items in one piece, or the events that build them up.

One object answers one request. A replica's chunks open, extend and close items in the order in which they
come; the item that is open is the last of the output.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.wire.responses_items import CallItem, Events, Item, MessageItem, ReasoningItem

_DATA = b"data: "
_ID_PREFIX = "chatcmpl-"


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    user: str | None


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, frozen=True):
    function: _Function
    id: str | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[Any] | None = None


class _Said(msgspec.Struct, frozen=True):
    """A message, or what a chunk adds to one."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Said = _Said()
    delta: _Said = _Said()
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct, frozen=True):
    """A completion or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[_Choice]


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]
    neurons: float


_completion_decoder = msgspec.json.Decoder(_Completion)
_usage_decoder = msgspec.json.Decoder(_Usage)


class ResponsesAnswer:
    """See :class:`gateway.wire.answer_form.AnswerForm`."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self._head = _Completion("", 0, "", [])
        self._items: list[Item] = []
        self._events = Events()
        self._is_cut = False

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        self._head = _completion_decoder.decode(completion)
        for choice in self._head.choices:
            self._take(choice.message, choice)
        self._close_last()
        return msgspec.json.encode(self._response(self._end_status(), usage))

    def forward(self, block: bytes) -> bytes:
        for frame in block.split(b"\n\n"):
            if frame.startswith(_DATA):
                self._take_chunk(_completion_decoder.decode(frame[len(_DATA) :]))
        return self._events.take()

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        if not self._head.id:
            self._begin(_completion_decoder.decode(final_chunk))
        self._close_last()
        status = self._end_status()
        self._events.add(f"response.{status}", response=self._response(status, usage))
        return self._events.take()

    def failure(self, code: str, message: str) -> bytes:
        response = self._response("failed", None)
        response["error"] = {"code": "server_error", "message": message}
        self._events.add("response.failed", response=response)
        self._events.add("error", code=code, message=message, param=None)
        return self._events.take()

    # -- items ---------------------------------------------------------------------------------------------

    def _take_chunk(self, chunk: _Completion) -> None:
        if not self._head.id:
            self._begin(chunk)
        for choice in chunk.choices:
            self._take(choice.delta, choice)

    def _begin(self, chunk: _Completion) -> None:
        self._head = chunk
        for event in ("created", "in_progress"):
            self._events.add(f"response.{event}", response=self._response("in_progress", None))

    def _take(self, said: _Said, choice: _Choice) -> None:
        if said.reasoning_content:
            self._item(ReasoningItem).extend(said.reasoning_content, [])
        if said.content:
            logprobs = choice.logprobs.content if choice.logprobs else None
            self._item(MessageItem).extend(said.content, logprobs or [])
        for call in said.tool_calls or ():
            if call.id:
                self._open(CallItem(self._item_id("fc"), call.id, call.function.name or ""))
            if call.function.arguments and isinstance(self._items[-1], CallItem):
                self._items[-1].extend(call.function.arguments, [])
        if choice.finish_reason == "length":
            self._is_cut = True

    def _item(self, kind: type[ReasoningItem] | type[MessageItem]) -> Item:
        """The open item, which is made one of this kind."""
        if not self._items or not isinstance(self._items[-1], kind):
            self._open(kind(self._item_id(kind.prefix)))
        return self._items[-1]

    def _open(self, item: Item) -> None:
        self._close_last()
        self._items.append(item)
        item.open(self._events, len(self._items) - 1)

    def _close_last(self) -> None:
        if self._items:
            self._items[-1].close("incomplete" if self._is_cut else "completed")

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self._items)}"

    # -- the response --------------------------------------------------------------------------------------

    @property
    def _request_id(self) -> str:
        return self._head.id.removeprefix(_ID_PREFIX)

    def _end_status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    def _response(self, status: str, usage: bytes | None) -> dict[str, Any]:
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "max_tool_calls": None,
            "model": self._head.model,
            "output": [item.as_json() for item in self._items],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **msgspec.structs.asdict(self._echo),
        }


def _usage(raw: bytes) -> dict[str, Any]:
    usage = _usage_decoder.decode(raw)
    return {
        "input_tokens": usage.prompt_tokens,
        # Clients want to know of writes, which cost nothing here.
        "input_tokens_details": usage.prompt_tokens_details | {"cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": usage.completion_tokens_details,
        "total_tokens": usage.total_tokens,
        "neurons": usage.neurons,
    }
