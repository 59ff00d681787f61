"""Response heads: the headers that every answer of a kind carries."""

from __future__ import annotations

from gateway.call import Call
from gateway.edge.exchange import Headers
from gateway.errors import Refusal
from gateway.wire.workers_ai import GATEWAY_RUN_PATH

REPLICA_HEADER = "x-embergate-replica"

_STREAM = (
    ("content-type", "text/event-stream"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)
_JSON = ("content-type", "application/json")


def stream_headers(call: Call) -> Headers:
    """Headers of a stream; neurons are not known yet."""
    return (
        *_STREAM,
        ("cf-ai-req-id", call.request_id),
        ("cf-ray", call.ray),
        *_log_id(call),
        *call.rate_headers,
        *_replica(call),
    )


def completion_headers(call: Call, neurons_e4: int) -> Headers:
    """Headers of an answer in one piece, with what it cost in neurons to four decimals."""
    return (
        _JSON,
        ("cf-ai-req-id", call.request_id),
        ("cf-ai-neurons", format_neurons(neurons_e4)),
        ("cf-ray", call.ray),
        *_log_id(call),
        *call.rate_headers,
        *_replica(call),
    )


def refusal_headers(call: Call, refusal: Refusal) -> Headers:
    """Headers of a refusal. Only those of the inference layer carry the request id."""
    headers = [_JSON, ("cf-ray", call.ray), *refusal.headers]
    if refusal.reason.layer == "inference":
        headers.append(("cf-ai-req-id", call.request_id))
    if refusal.retry_after_s is not None:
        headers.append(("retry-after", str(refusal.retry_after_s)))
    return headers


def format_neurons(neurons_e4: int) -> str:
    """Ten-thousandths of a neuron as a plain decimal number."""
    whole, fraction = divmod(neurons_e4, 10_000)
    return f"{whole}.{fraction:04d}".rstrip("0").rstrip(".")


def _log_id(call: Call) -> Headers:
    """What ``env.AI.gateway(id).getLog`` finds this request by."""
    return (("cf-aig-log-id", call.request_id),) if call.exchange.path == GATEWAY_RUN_PATH else ()


def _replica(call: Call) -> Headers:
    return ((REPLICA_HEADER, call.replica.id),) if call.num_attempts else ()
