"""The gateway's side of the wire to a replica: requests out, refusals and usage in."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from backend.wire import AbortResult, ErrorBody, ReplicaEmbeddingsRequest, ReplicaRequest
from billing.usage import Surface
from gateway.config import ServedModel
from gateway.errors import Reason, Refusal, bad_input
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.openai import ChatBody, ChatRequest

ABORT_PATH = "/abort"
USAGES_PATH = "/usages"

_INDEX = re.compile(r"\[(\d+)\]")
_context_overflow_codes = frozenset(("context_length_exceeded",))


class BillingContext(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request it is; echoed by replicas, so that a restarted gateway can write the record of its
    predecessor. ``gateway_id`` stays with a data directory.
    """

    account_id: str
    token_id: str
    model: str
    requested_model: str
    surface: Surface
    session: str
    started_at_us: int
    gateway_id: str = ""


def encode_billing_context(context: BillingContext) -> str:
    return msgspec.json.encode(context).decode()


def decode_billing_context(text: str) -> BillingContext | None:
    """None for a request that did not come from a gateway of ours."""
    try:
        return msgspec.json.decode(text, type=BillingContext)
    except msgspec.DecodeError:
        return None


def encode_embeddings(
    request: EmbeddingsRequest,
    model: ServedModel,
    *,
    request_id: str,
    billing_context: str,
    account_id: str,
) -> bytes:
    """The texts as a replica gets them."""
    return msgspec.json.encode(
        ReplicaEmbeddingsRequest(
            request_id=request_id,
            model=model.id,
            inputs=request.inputs,
            encoding_format=request.encoding_format,
            pooling=request.pooling,
            dimensions=request.dimensions,
            truncates=request.truncates,
            input_field=request.input_field,
            billing_context=billing_context,
            account_id=account_id,
            reject_if_busy=request.rejects_if_busy,
        )
    )


def encode_request(
    chat: ChatRequest,
    model: ServedModel,
    *,
    messages: list[dict[str, Any]],
    request_id: str,
    cache_salt: str,
    billing_context: str,
    account_id: str,
) -> bytes:
    """The request as a replica gets it. Nothing of the client's credentials or options is among it.

    ``messages`` are those of ``chat``, with every image in them.
    """
    body = chat.body
    return msgspec.json.encode(
        ReplicaRequest(
            request_id=request_id,
            model=model.id,
            messages=messages,
            cache_salt=cache_salt,
            billing_context=billing_context,
            account_id=account_id,
            stream=chat.is_stream,
            max_tokens=chat.max_tokens,
            default_max_tokens=model.default_max_tokens,
            temperature=_or(body.temperature, model.default_temperature),
            top_p=_or(body.top_p, model.default_top_p),
            top_k=body.top_k or 0,
            min_p=_or(body.min_p, 0.0),
            seed=body.seed,
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            logit_bias=body.logit_bias or {},
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            n=chat.num_choices,
            stop=chat.stop,
            ignore_eos=bool(body.ignore_eos),
            reject_if_busy=chat.rejects_if_busy,
            tools=[] if body.tool_choice == "none" else body.tools or [],
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            response_format=_response_format(body),
            reasoning_effort=_effort(body),
            thinking=body.thinking,
            chat_template_kwargs=body.chat_template_kwargs or {},
        )
    )


def _response_format(body: ChatBody) -> dict[str, Any] | None:
    """As the client sent it, so that refusals name the client's own fields; None for text."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return {"type": wanted.type}
    return {"type": wanted.type, "json_schema": wanted.json_schema}


def _effort(body: ChatBody) -> str | None:
    effort = body.reasoning_effort
    if effort is None:
        return "none"
    return None if effort is msgspec.UNSET else effort


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def decode_refusal(status: int, body: bytes) -> Refusal:
    """A replica's 4xx about the request itself, as the client gets it."""
    try:
        error = msgspec.json.decode(body, type=ErrorBody).error
    except msgspec.DecodeError:
        return Refusal(Reason.BAD_INPUT, f"Bad input: the model refused the request with status {status}")
    if error.code in _context_overflow_codes:
        return Refusal(Reason.CONTEXT_OVERFLOW, error.message)
    if status == 413:
        return Refusal(Reason.TOO_LARGE, error.message)
    if status == 408:
        return Refusal(Reason.TIMEOUT, error.message)
    if not error.param:
        return Refusal(Reason.BAD_INPUT, f"Bad input: {error.message}")
    pointer = _INDEX.sub(r"/\1", error.param).replace(".", "/")
    return bad_input(f"/{pointer}", error.message.removeprefix(f"{error.param}: "))


def decode_abort_result(body: bytes) -> AbortResult:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(body, type=AbortResult)
