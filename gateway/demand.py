"""What a request may come to take, estimated before any replica has counted its tokens."""

from __future__ import annotations

from gateway.call import Call
from gateway.limits import Demand
from gateway.wire.embeddings import EmbeddingsRequest

_BYTES_PER_TOKEN = 3
"""Text has about four bytes a token, so this is an upper estimate for most of it; settling corrects it."""


def demand_of(call: Call) -> Demand:
    """The prompt by the size of the body apart from its images, and the longest answer asked for."""
    request, model = call.request, call.model
    num_bytes = max(len(call.exchange.body) - call.images.num_url_chars, 0)
    max_completion_tokens = 0
    if not isinstance(request, EmbeddingsRequest):
        max_completion_tokens = (request.max_tokens or model.default_max_tokens) * request.num_choices
    return Demand(
        call.account_id,
        call.principal.token_id,
        model.id,
        call.started_at_us,
        min(-(-num_bytes // _BYTES_PER_TOKEN), model.max_model_len),
        max_completion_tokens,
    )
