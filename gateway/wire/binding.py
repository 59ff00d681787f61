"""The wire of ``env.AI``: inputs and options in one body, the model in a header, bare answers.

A Worker's runtime reads an answer as an object only when its content type is exactly ``application/json``,
and makes ``InferenceUpstreamError: CODE: DESCRIPTION`` of an error. There is no account in the path: the
runtime injects ``authorization`` and, if it likes, ``x-cf-account-id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import parse_qsl

import msgspec

from gateway.errors import Reason, Refusal, bad_input
from gateway.wire.openai import explain_decoding
from gateway.wire.workers_ai import RunOptions

_JSON_OBJECT = dict[str, msgspec.Raw]
_STREAM_INPUT = "userInputs="
_MAX_QUERY_FIELDS = 64

_CODES: Mapping[int, int] = MappingProxyType({3021: 3040, 4006: 3036})
"""Codes that clients of the binding map to no status, and the nearest ones that they do retry or report."""


class BindingRequest(msgspec.Struct, frozen=True):
    """What a Worker gave ``env.AI.run``: ``inputs`` is an encoded JSON object."""

    inputs: bytes
    options: RunOptions | None


class _Body(msgspec.Struct, frozen=True):
    inputs: msgspec.Raw = msgspec.Raw()
    options: RunOptions | None = None


class _ErrorItem(msgspec.Struct, frozen=True):
    code: int
    message: str


class _Error(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Both forms that runtimes know: older ones read ``internalCode`` only, agents read ``errors``."""

    internal_code: int
    description: str
    message: str
    errors: list[_ErrorItem]
    name: str = "InferenceUpstreamError"
    success: bool = False


_body_decoder = msgspec.json.Decoder(_Body)
_object_decoder = msgspec.json.Decoder(_JSON_OBJECT)


def model_of(headers: Mapping[str, str]) -> str | None:
    """The model that a Worker named, or None."""
    return headers.get("cf-consn-model-id") or None


def account_of(headers: Mapping[str, str]) -> str:
    """The account that the runtime injects; "" leaves it to the API token."""
    return headers.get("x-cf-account-id", "")


def decode_run(body: bytes, query: str) -> BindingRequest:
    """Take the inputs and the options of one ``run`` apart.

    Inputs with a stream among them come with the stream as the body and all else in the query; the only
    stream that a language model can read is one of JSON, whose fields join the others.

    Raises:
        Refusal: 400, naming what is wrong.
    """
    if _STREAM_INPUT in query:
        return _decode_stream_run(body, query)
    if not body:
        raise Refusal(Reason.MISSING_BODY, "Request is missing headers or body: body")
    try:
        decoded = _body_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain_decoding(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(Reason.BAD_INPUT, f"Bad input: the body is not valid JSON: {error}") from error
    inputs = bytes(decoded.inputs)
    if not inputs:
        raise bad_input("/inputs", "is required")
    return BindingRequest(inputs, decoded.options)


def encode_refusal(refusal: Refusal) -> bytes:
    """The error body from which the runtime makes ``InferenceUpstreamError: CODE: MESSAGE``."""
    code = _CODES.get(refusal.reason.code, refusal.reason.code)
    message = refusal.message
    error = _Error(
        internal_code=code, description=message, message=message, errors=[_ErrorItem(code, message)]
    )
    return msgspec.json.encode(error)


def _decode_stream_run(body: bytes, query: str) -> BindingRequest:
    try:
        fields = dict(parse_qsl(query, max_num_fields=_MAX_QUERY_FIELDS))
    except ValueError as error:
        raise bad_input("/", f"the query has more than {_MAX_QUERY_FIELDS} fields") from error
    try:
        inputs = _object_decoder.decode(fields.get("userInputs", "{}"))
    except msgspec.DecodeError as error:
        raise bad_input("/userInputs", "must be a JSON object") from error
    try:
        streamed = _object_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = "a stream given as input must hold a JSON object: the model reads no other media this way"
        raise bad_input("/inputs", problem) from error
    options = RunOptions(
        reject_if_busy=fields.get("rejectIfBusy") == "true", session_affinity=fields.get("sessionAffinity")
    )
    return BindingRequest(msgspec.json.encode(inputs | streamed), options)
