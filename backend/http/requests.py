"""A request body becomes sampling parameters, or a 400 that names the one wrong field.

The gateway has validated requests already; what is checked again here is what the engine relies on, and what
this replica cannot honour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from backend.config import BackendConfig, TextConfig
from backend.engine.messages import EngineInfo, MediaSpan, SamplingParams
from backend.http.errors import bad_request, context_length_exceeded
from backend.text.stop_strings import StopStrings
from backend.wire import ReplicaRequest

_decoder = msgspec.json.Decoder(ReplicaRequest)

# Field, lowest and highest value.
_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", 0.0, 5.0),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 10.0),
    ("top_logprobs", 0, 20),
    ("seed", -(2**63), 2**63 - 1),
    ("max_tokens", 1, 2**31 - 1),
)


def decode_request(body: bytes) -> ReplicaRequest:
    """Decode a request.

    Raises:
        ReplicaError: 400 that names the wrong field.
    """
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        place = re.search(r" - at `\$\.?(.*?)`$", message)
        missing = re.search(r"missing required field `(.*?)`", message)
        param = missing[1] if missing else place[1] if place else None
        raise bad_request(param, message) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(None, f"the body is not JSON: {error}", "invalid_json") from error


def check_request(request: ReplicaRequest, config: BackendConfig) -> None:
    """Check values that the types leave open.

    Raises:
        ReplicaError: 400 that names the wrong field.
    """
    if not request.request_id:
        raise bad_request("request_id", "must not be empty")
    for name, lowest, highest in _RANGES:
        value = getattr(request, name)
        if value is not None and not lowest <= value <= highest:
            raise bad_request(name, f"must be {lowest:g} to {highest:g}")
    if not 1 <= request.n <= config.max_choices:
        raise bad_request("n", f"must be 1 to {config.max_choices}")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", "needs logprobs to be true")
    _check_stops(request.stop, config)


def _check_stops(stops: list[str], config: BackendConfig) -> None:
    if len(stops) > config.text.max_stop_strings:
        raise bad_request("stop", f"at most {config.text.max_stop_strings} strings are allowed")
    if sum(map(len, stops)) > config.text.max_stop_chars:
        raise bad_request("stop", f"at most {config.text.max_stop_chars} characters are allowed")
    if not all(stops):
        raise bad_request("stop", "an empty string would stop every answer")


def check_media(request: ReplicaRequest, media: Sequence[MediaSpan], config: TextConfig) -> None:
    """Check that the images may be sent to the engine once for each choice.

    Raises:
        ReplicaError: 400, when there are too many choices for them.
    """
    num_tokens = sum(span.num_tokens for span in media)
    if num_tokens * request.n > config.max_image_tokens:
        most = config.max_image_tokens // num_tokens
        raise bad_request("n", f"with the images of this request, must be at most {most}")


def compile_stops(request: ReplicaRequest) -> StopStrings | None:
    return StopStrings(request.stop) if request.stop else None


def choose_max_tokens(request: ReplicaRequest, num_prompt_tokens: int, info: EngineInfo) -> int:
    """How many tokens may be generated: what was asked for, or the default as far as the context has room.

    Raises:
        ReplicaError: 400 when prompt and completion do not fit together.
    """
    room = info.max_model_len - num_prompt_tokens
    default = room if request.default_max_tokens is None else min(request.default_max_tokens, room)
    wanted = default if request.max_tokens is None else request.max_tokens
    if wanted > room or room < 1:
        raise context_length_exceeded(info.max_model_len, num_prompt_tokens, max(wanted, 1))
    return wanted


def sampling_params(
    request: ReplicaRequest,
    max_tokens: int,
    info: EngineInfo,
    stop_token_ids: tuple[int, ...] = (),
    grammar: str = "",
) -> SamplingParams:
    """The engine's parameters for choice 0; ``stop_token_ids`` are those of the model's text side.

    Raises:
        ReplicaError: 400 when ``logit_bias`` names no token of the vocabulary.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        # A share of nothing still holds the likeliest token.
        top_p=request.top_p or 1.0,
        top_k=request.top_k if request.top_p else 1,
        min_p=request.min_p,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=_token_biases(request.logit_bias, info.vocab_size),
        num_logprobs=request.top_logprobs if request.logprobs else None,
        # Who ignores the end of an answer means every token that can be one.
        stop_token_ids=() if request.ignore_eos else stop_token_ids,
        ignore_eos=request.ignore_eos,
        grammar=grammar,
    )


def _token_biases(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    checked: dict[int, float] = {}
    for spelling, bias in biases.items():
        param = f"logit_bias.{spelling}"
        if not spelling.isascii() or not spelling.isdigit() or int(spelling) >= vocab_size:
            raise bad_request(param, f"must be a token id from 0 to {vocab_size - 1}")
        if not -100 <= bias <= 100:
            raise bad_request(param, "must be -100 to 100")
        checked[int(spelling)] = bias
    return checked
