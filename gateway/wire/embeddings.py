"""Embeddings: what a client may send on either surface, what a replica gets, and the native form of answers.

Native bodies are ``{"text": "..." | [...], "pooling"}``; OpenAI's are ``{"input": ..., "encoding_format"}``,
where an input may be text or token ids. Vectors are never decoded here: they pass as the JSON that the
replica wrote.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Any

import msgspec

from backend.wire import EMBEDDINGS_PATH, EmbeddingInput, EncodingFormat, Pooling
from gateway.errors import Reason, Refusal, bad_input
from gateway.wire.answer_form import AnswerForm
from gateway.wire.openai import explain_decoding
from gateway.wire.workers_ai import RunOptions, envelop


class Context(msgspec.Struct, frozen=True):
    text: str


class NativeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``text`` is what to embed; ``contexts`` instead are embedded, or ranked by a ``query``."""

    model: str | None = None
    text: str | list[str] | None = None
    pooling: Pooling | None = None
    truncate_inputs: bool | None = None
    query: str | None = None
    contexts: list[Context] | None = None
    options: RunOptions | None = None
    requests: Any = None
    request_id: Any = None


class OpenAIBody(msgspec.Struct, frozen=True, kw_only=True):
    """``dimensions`` is honoured only when it is what the model has: see the replica's refusal."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    truncate_inputs: bool | None = None
    user: str | None = None
    options: RunOptions | None = None


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request. What the pipeline asks of every request is the same as of a chat."""

    model: str
    inputs: EmbeddingInput
    encoding_format: EncodingFormat = "float"
    pooling: Pooling | None = None
    dimensions: int | None = None
    truncates: bool = False
    input_field: str = "input"
    options: RunOptions | None = None
    answer_form: AnswerForm | None = None
    is_stream: bool = False
    includes_usage: bool = False
    rejects_if_busy: bool = False
    num_choices: int = 1
    replica_path: str = EMBEDDINGS_PATH
    prompt_cache_key: str | None = None
    messages: list[dict[str, Any]] = []


class _Vector(msgspec.Struct, frozen=True):
    embedding: msgspec.Raw


class _Vectors(msgspec.Struct, frozen=True):
    data: list[_Vector]
    dimensions: int
    pooling: str


_native_decoder = msgspec.json.Decoder(NativeBody)
_openai_decoder = msgspec.json.Decoder(OpenAIBody)
_vectors_decoder = msgspec.json.Decoder(_Vectors)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NativeVectors:
    """``{"shape": [n, d], "data": [[...], ...], "pooling", "usage"}``, bare or in the envelope."""

    name = b"data"
    encoding_format: EncodingFormat = "float"

    def __init__(self, *, is_enveloped: bool) -> None:
        self._is_enveloped = is_enveloped

    def bare(self) -> NativeVectors:
        """The same form without the envelope."""
        return type(self)(is_enveloped=False)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        result = self.result(_vectors_decoder.decode(completion), usage)
        return envelop(result) if self._is_enveloped else result

    def result(self, vectors: _Vectors, usage: bytes) -> bytes:
        data = b",".join(bytes(vector.embedding) for vector in vectors.data)
        shape = b"[%d,%d]" % (len(vectors.data), vectors.dimensions)
        pooling = msgspec.json.encode(vectors.pooling)
        return b'{"shape":%b,"%b":[%b],"pooling":%b,"usage":%b}' % (shape, self.name, data, pooling, usage)

    def forward(self, block: bytes) -> bytes:
        return block

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return b""

    def failure(self, code: str, message: str) -> bytes:
        return b""


class ContextVectors(NativeVectors):
    """The same under the name that contexts have."""

    name = b"response"


class Scores(NativeVectors):
    """``{"response": [{"id", "score"}, ...]}``: how near each context is to the query, the first vector."""

    encoding_format: EncodingFormat = "base64"

    def result(self, vectors: _Vectors, usage: bytes) -> bytes:
        query, *contexts = (_floats(vector.embedding) for vector in vectors.data)
        scores = [
            {"id": index, "score": math.fsum(map(mul, query, context))}
            for index, context in enumerate(contexts)
        ]
        return b'{"response":%b,"usage":%b}' % (msgspec.json.encode(scores), usage)


def _floats(raw: msgspec.Raw) -> array[float]:
    """The float32 numbers of a vector in base64."""
    return array("f", base64.b64decode(msgspec.json.decode(raw, type=str)))


def decode_native(
    raw: bytes, *, path_model: str | None, max_inputs: int, is_enveloped: bool
) -> EmbeddingsRequest:
    """Decode a native body. Raises Refusal: 400, naming the one wrong field."""
    body: NativeBody = _decode(_native_decoder, raw)
    for name in ("requests", "request_id"):
        if getattr(body, name) is not None:
            problem = "asynchronous batches are not available here; send 'text' with an array instead"
            raise bad_input(f"/{name}", problem)
    field, texts = _native_texts(body)
    _check_inputs(f"/{field}", texts, max_inputs)
    form: NativeVectors = NativeVectors(is_enveloped=is_enveloped)
    if body.contexts is not None:
        form = ContextVectors(is_enveloped=is_enveloped)
    if body.query is not None:
        form = Scores(is_enveloped=is_enveloped)
        texts = [body.query, *texts]
        _check_inputs("/query", texts[:1], max_inputs)
    return EmbeddingsRequest(
        model=_model_of(path_model or body.model),
        inputs=list(texts),
        encoding_format=form.encoding_format,
        pooling=body.pooling,
        truncates=bool(body.truncate_inputs),
        input_field=field,
        options=body.options,
        rejects_if_busy=bool(body.options and body.options.reject_if_busy),
        answer_form=form,
    )


def _native_texts(body: NativeBody) -> tuple[str, list[str]]:
    """What is to be embedded, and what the client calls it."""
    if body.contexts is not None:
        if body.text is not None:
            raise bad_input("/text", "does not go with 'contexts'")
        return "contexts", [context.text for context in body.contexts]
    if body.query is not None:
        raise bad_input("/contexts", "is required for a 'query'")
    if body.text is None:
        raise bad_input("/text", "is required")
    return "text", [body.text] if isinstance(body.text, str) else body.text


def decode_openai(raw: bytes, *, max_inputs: int) -> EmbeddingsRequest:
    """Decode an OpenAI body. Raises Refusal: 400, naming the one wrong field."""
    body: OpenAIBody = _decode(_openai_decoder, raw)
    if body.input is None:
        raise bad_input("/input", "is required")
    if body.dimensions is not None and body.dimensions < 1:
        raise bad_input("/dimensions", "must be at least 1")
    inputs = _inputs_of(body.input)
    _check_inputs("/input", inputs, max_inputs)
    return EmbeddingsRequest(
        model=_model_of(body.model),
        inputs=inputs,
        encoding_format=body.encoding_format or "float",
        dimensions=body.dimensions,
        truncates=bool(body.truncate_inputs),
        options=body.options,
        rejects_if_busy=bool(body.options and body.options.reject_if_busy),
    )


def _decode(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    if not raw:
        raise Refusal(Reason.MISSING_BODY, "Request is missing headers or body: body")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain_decoding(error) from error


def _model_of(model: str | None) -> str:
    if not model:
        raise bad_input("/model", "is required")
    return model


def _inputs_of(given: str | list[str | int | list[int]]) -> EmbeddingInput:
    """One text, one list of token ids, or several of either."""
    if isinstance(given, str):
        return [given]
    tokens = [each for each in given if isinstance(each, int)]
    if tokens and len(tokens) == len(given):
        return [tokens]
    inputs = [each for each in given if not isinstance(each, int)]
    if len({type(each) for each in given}) > 1:
        raise bad_input("/input", "must hold texts, lists of token ids, or token ids, and only one of these")
    return inputs


def _check_inputs(pointer: str, inputs: Sequence[str | list[int]], max_inputs: int) -> None:
    if not inputs:
        raise bad_input(pointer, "must hold at least one text")
    if len(inputs) > max_inputs:
        raise bad_input(pointer, f"must hold at most {max_inputs} texts")
    for index, text in enumerate(inputs):
        if not text:
            raise bad_input(f"{pointer}/{index}", "must not be empty")


def openai_list(completion: bytes, usage: bytes) -> bytes:
    """A replica's answer as OpenAI's list of embeddings."""
    members = _object_decoder.decode(completion)
    for name in ("dimensions", "pooling"):
        members.pop(name, None)
    members["usage"] = msgspec.Raw(usage)
    return msgspec.json.encode(members)
