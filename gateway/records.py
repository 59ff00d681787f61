"""Usage records of calls, and what stands in them when a replica's counts are missing or cannot be true."""

from __future__ import annotations

import time

from backend.wire import BadReplicaMessageError, TokenUsage, decode_usage
from billing.usage import MAX_TOKENS, Status, UsageRecord
from gateway.call import Call
from gateway.wire.workers_ai import session_label

_BYTES_PER_TOKEN = 4
"""Only for estimates of prompts whose replica cannot be asked any more."""


def usage_seen(call: Call) -> TokenUsage | None:
    """The final usage, when it came just as the client left."""
    if call.relay is None or call.relay.usage is None:
        return None
    try:
        return decode_usage(call.relay.usage)
    except BadReplicaMessageError:
        return None


def record_of(call: Call, status: Status, usage: TokenUsage, *, is_estimated: bool) -> UsageRecord:
    """Raises InvalidUsageError when the counts contradict each other."""
    first_byte_at = call.first_byte_at
    return UsageRecord(
        request_id=call.request_id,
        account_id=call.account_id,
        token_id=call.principal.token_id,
        model=call.model.id,
        requested_model=call.request.model,
        surface=call.surface.name,
        replica_id=call.replica.id,
        session=session_label(call.session),
        started_at_us=call.started_at_us,
        finished_at_us=max(time.time_ns() // 1000, call.started_at_us),
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.completion_tokens_details.reasoning_tokens,
        status=status,
        is_estimated=is_estimated,
        ttft_us=0 if first_byte_at is None else max(int((first_byte_at - call.started_at) * 1e6), 0),
        num_attempts=call.num_attempts,
        num_cached_blocks=usage.num_cached_blocks,
        cache_head=usage.cache_head,
    )


def plausible(usage: TokenUsage) -> TokenUsage:
    """Counts that contradict each other, brought within their bounds: in the customer's favour."""
    prompt = min(max(usage.prompt_tokens, 0), MAX_TOKENS)
    completion = min(max(usage.completion_tokens, 0), MAX_TOKENS)
    return TokenUsage.of(
        prompt=prompt,
        cached=min(max(usage.cached_prompt_tokens, 0), prompt),
        completion=completion,
        reasoning=min(max(usage.completion_tokens_details.reasoning_tokens, 0), completion),
    )


def estimate(call: Call) -> TokenUsage:
    """Counts of a request whose replica cannot be asked: forwarded chunks, and the prompt by its size."""
    num_tokens = max(call.num_frames - call.request.num_choices, 0)  # a choice's first chunk holds no text
    # What an image costs nobody here can tell, least of all the length of its file: it is left out.
    num_bytes = max(len(call.exchange.body) - call.images.num_url_chars, 0)
    prompt_tokens = num_bytes // _BYTES_PER_TOKEN if call.num_frames else 0
    return TokenUsage.of(prompt=prompt_tokens, completion=num_tokens)
