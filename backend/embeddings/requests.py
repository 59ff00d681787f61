"""A request's body becomes inputs of token ids, or a 400 that names the one wrong field."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from backend.embeddings.encoder import Encoder
from backend.http.errors import ReplicaError, bad_request
from backend.wire import ReplicaEmbeddingsRequest

_decoder = msgspec.json.Decoder(ReplicaEmbeddingsRequest)
_PLACE = re.compile(r" - at `\$\.?(.*?)`$")


def decode_request(body: bytes) -> ReplicaEmbeddingsRequest:
    """Raises ReplicaError: 400 that names the wrong field."""
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        raise bad_request(place[1] if place else None, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(None, f"the body is not JSON: {error}", "invalid_json") from error
    if not request.request_id:
        raise bad_request("request_id", "must not be empty")
    if not request.inputs:
        raise bad_request(request.input_field, "must hold at least one text")
    return request


def check_request(request: ReplicaEmbeddingsRequest, dimensions: int) -> None:
    """Refuse what this model cannot do. Raises ReplicaError: 400."""
    if request.dimensions not in (None, dimensions):
        message = f"the vectors of this model have {dimensions} dimensions and cannot be shortened"
        raise bad_request("dimensions", message, "unsupported_value")


def token_inputs(request: ReplicaEmbeddingsRequest, encoder: Encoder) -> list[list[int]]:
    """The request's inputs as the model gets them. Blocks: texts are tokenized.

    Raises:
        ReplicaError: 400 that names the input: too long, or with a token that the model does not have.
    """
    texts = [each for each in request.inputs if isinstance(each, str)]
    if texts:
        inputs = encoder.tokenize(texts)
    else:
        inputs = [encoder.framed(each) for each in request.inputs if not isinstance(each, str)]
        _check_tokens(request.input_field, inputs, encoder.vocab_size)
    if len(inputs) != len(request.inputs):
        raise bad_request(request.input_field, "must hold texts or lists of token ids, not both")
    if request.truncates:
        return [encoder.shortened(token_ids) for token_ids in inputs]
    for index, token_ids in enumerate(inputs):
        if len(token_ids) > encoder.max_model_len:
            raise _too_long(f"{request.input_field}.{index}", len(token_ids), encoder.max_model_len)
    return inputs


def _check_tokens(field: str, inputs: Sequence[Sequence[int]], vocab_size: int) -> None:
    for index, token_ids in enumerate(inputs):
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            message = f"token ids are those of this model, from 0 to {vocab_size - 1}"
            raise bad_request(f"{field}.{index}", message)


def _too_long(param: str, num_tokens: int, max_model_len: int) -> ReplicaError:
    """The sentence is what agents search for: keep it as it is."""
    message = (
        f"Requested token count exceeds the model's maximum context length of {max_model_len} tokens: "
        f"{param} has {num_tokens}. Please shorten it, or send 'truncate_inputs': true."
    )
    return bad_request(param, message, "context_length_exceeded")
