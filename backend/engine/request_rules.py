"""What a request for a sequence must fulfil, whatever else is running."""

from __future__ import annotations

import math

from backend.engine.limits import RefusedError
from backend.engine.messages import SequenceRequest
from backend.engine.prefix_cache import DIGEST_BYTES


def refuse_invalid(request: SequenceRequest, vocab_size: int, *, has_grammars: bool = True) -> None:
    """Check what would otherwise fail inside of a step, where it could harm others.

    Raises:
        RefusedError: naming the one wrong field.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise RefusedError("invalid_request", "prompt_token_ids: must not be empty")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RefusedError("invalid_request", f"prompt_token_ids: ids must be in 0..{vocab_size - 1}")
    is_number = math.isfinite
    checks = (
        ("media", _are_spans_in(request), "images over runs of prompt tokens, in order"),
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", is_number(sampling.temperature) and sampling.temperature >= 0, "at least 0"),
        ("top_p", 0 < sampling.top_p <= 1, "over 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "at least 0"),
        ("min_p", 0 <= sampling.min_p <= 1, "in 0..1"),
        ("frequency_penalty", is_number(sampling.frequency_penalty), "a finite number"),
        ("presence_penalty", is_number(sampling.presence_penalty), "a finite number"),
        (
            "repetition_penalty",
            is_number(sampling.repetition_penalty) and sampling.repetition_penalty > 0,
            "over 0",
        ),
        ("num_logprobs", (sampling.num_logprobs or 0) >= 0, "at least 0"),
        ("grammar", has_grammars or not sampling.grammar, "empty: this engine has no vocabulary for one"),
        ("ignore_eos", not (sampling.ignore_eos and sampling.grammar), "false with a grammar"),
        (
            "logit_bias",
            all(0 <= token < vocab_size and is_number(bias) for token, bias in sampling.logit_bias.items()),
            f"finite numbers for token ids in 0..{vocab_size - 1}",
        ),
    )
    for field, is_right, rule in checks:
        if not is_right:
            raise RefusedError("invalid_request", f"{field}: must be {rule}")


def _are_spans_in(request: SequenceRequest) -> bool:
    """Whether the images lie in the prompt, one after another, each with a digest of full width."""
    end = 0
    for span in request.media:
        if span.start < end or span.num_tokens < 1 or len(span.digest) != DIGEST_BYTES:
            return False
        end = span.end
    return end <= len(request.prompt_token_ids)
