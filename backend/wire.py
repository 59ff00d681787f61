"""What crosses the line between the gateway and a replica.

A leaf module: msgspec and nothing else. The gateway imports this module of the backend and no other.

A replica speaks the OpenAI chat-completions form, so that its stream chunks can be forwarded to clients
byte for byte, plus the fields below. Both sides ignore unknown fields, so that replicas can be upgraded
one at a time.

Routes of a replica (all but /health and /metrics want ``authorization: Bearer <pool token>`` when one is
set):

=================================  ==========================================================================
``POST /v1/chat/completions``      :class:`ReplicaRequest` -> ``chat.completion`` or an SSE stream
``POST /v1/embeddings``            :class:`ReplicaEmbeddingsRequest` -> an OpenAI list of embeddings, with
                                   ``dimensions`` and ``pooling``; replicas of embedding models only
``POST /abort``                    :class:`AbortRequest` -> :class:`AbortResult`; idempotent in every state
``GET /health``                    :class:`Health`; 200 when ready, 503 while starting or draining
``GET /stats``                     :class:`ReplicaStats`
``GET /usages?after=SEQUENCE``     :class:`RecentUsages`; what the gateway reconciles with after a crash;
                                  ``?request_id=ID`` instead: the end of that one request, if it is remembered
``POST /drain``, ``POST /resume``  :class:`Health`; reversible
``GET /metrics``                   Prometheus text
=================================  ==========================================================================

And one of a gateway, for replicas that are not in its configuration: ``POST /internal/replicas`` takes a
signed :class:`Registration` and answers with 204.

A stream is ``data: <chat.completion.chunk>`` frames, the last of them with ``"choices":[]`` and the one
authoritative ``usage``, then ``data: [DONE]``. An error after the first byte is one frame
``data: {"error":{...}}`` and a closed connection, without ``[DONE]``.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Literal

import msgspec

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
REGISTRATION_PATH = "/internal/replicas"
SIGNATURE_HEADER = "x-embergate-signature"
PREFILL_HEADER = "x-embergate-prefill"
"""Where a replica lets the prompt of a completion be computed, as ``host:port``; from gateways only."""

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]

Role = Literal["both", "prefill", "decode"]
EmbeddingInput = list[str | list[int]]
EncodingFormat = Literal["float", "base64"]
Pooling = Literal["mean", "cls"]


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the prompt tokens were served from the prefix cache at first admission, and, when there are
    any, which stand for images."""

    cached_tokens: int = 0
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the completion tokens were reasoning."""

    reasoning_tokens: int = 0


class CachedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix-cache blocks that a prompt was served from: how many, and the digest of the last of them.

    A digest chains over all blocks before it, so ``head`` (64 hexadecimal characters) stands for them all.
    """

    num_blocks: int
    head: str


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request in the OpenAI form; the engine is the only authority for them.

    ``prompt_tokens`` includes the cached ones and is counted once whatever ``n`` is;
    ``completion_tokens`` is the sum over all choices. ``cached_blocks`` says what the cached tokens were
    served from; it is for the gateway's records, not for clients.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()
    cached_blocks: CachedBlocks | msgspec.UnsetType = msgspec.UNSET

    @property
    def cached_prompt_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens

    @property
    def num_cached_blocks(self) -> int:
        """0 also where the replica does not say."""
        blocks = self.cached_blocks
        return 0 if blocks is msgspec.UNSET else blocks.num_blocks

    @property
    def cache_head(self) -> str:
        """The digest of the last cached block, or ""."""
        blocks = self.cached_blocks
        return "" if blocks is msgspec.UNSET else blocks.head

    @classmethod
    def of(
        cls,
        *,
        prompt: int,
        completion: int,
        cached: int = 0,
        reasoning: int = 0,
        image: int = 0,
        cached_blocks: CachedBlocks | None = None,
    ) -> TokenUsage:
        """Build a usage from plain counts, so that the total cannot disagree with its parts."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=cached, image_tokens=image or msgspec.UNSET
            ),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
            cached_blocks=cached_blocks or msgspec.UNSET,
        )


class ReplicaRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat completion as the gateway sends it: validated, with the gateway's own fields added.

    ``messages`` stays undecoded JSON-like data: the chat template reads it as it is. ``model`` is the
    catalog id to name in the answer. ``cache_salt`` roots the block hashes (never taken from a client).
    ``billing_context`` is opaque to the replica; it is echoed in :class:`RecentUsage`. ``account_id`` is for
    log lines only. ``request_id`` makes ids and aborts. ``default_max_tokens`` holds when ``max_tokens`` is
    null, as far as the context has room.
    """

    request_id: str
    model: str
    messages: list[dict[str, Any]]
    cache_salt: str = ""
    billing_context: str = ""
    account_id: str = ""
    stream: bool = False
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    stop: list[str] = []
    ignore_eos: bool = False
    reject_if_busy: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Any = None
    chat_template_kwargs: dict[str, Any] = {}


class ReplicaEmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts to embed, as the gateway sends them to a replica of an embedding model.

    An input is text or token ids, all of one kind. ``pooling`` and ``dimensions`` null mean the model's own.
    ``truncates``: longer inputs are cut to the model's length instead of refused. ``input_field`` is what
    the client calls its inputs, for refusals. The other fields mean what
    they mean in :class:`ReplicaRequest`.
    """

    request_id: str
    model: str
    inputs: EmbeddingInput
    encoding_format: EncodingFormat = "float"
    pooling: Pooling | None = None
    dimensions: int | None = None
    truncates: bool = False
    input_field: str = "input"
    billing_context: str = ""
    account_id: str = ""
    reject_if_busy: bool = False


class AbortRequest(msgspec.Struct, frozen=True):
    """Stop a request. A stream still read ends with ``finish_reason`` "abort", usage and ``[DONE]``."""

    request_id: str


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An error in the OpenAI form; ``code`` is a stable word, ``param`` the one wrong field."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``fraction`` (0 to 1) of the start is done, and ``stage`` says in a few words what is being done.

    ``role``: what the replica does of a request (all of it, prompts for others, answers to prompts that
    others computed); with ``can_fetch`` it can be told to have a prompt computed elsewhere. ``transfer`` is
    where it computes prompts for others, as ``host:port``, "" where it does not; ``kv_room_tokens`` what its
    KV cache could take in now, -1 when it does not say.
    """

    status: Literal["starting", "ready", "draining"]
    replica_id: str
    model: str = ""
    stage: str = ""
    fraction: float = 1.0
    role: Role = "both"
    transfer: str = ""
    can_fetch: bool = False
    kv_room_tokens: int = -1


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters (since the start) and gauges of one replica; ``started_at`` tells restarts apart."""

    replica_id: str
    model: str
    started_at: float
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    num_preemptions: int = 0
    num_requests: int = 0
    num_aborts: int = 0


class RecentUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one request as the replica saw it; kept for a bounded time so that a restarted gateway
    can record what its predecessor could not."""

    sequence: int
    request_id: str
    billing_context: str
    usage: TokenUsage
    finish_reason: FinishReason
    finished_at: float


class AbortResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the request: answered when its blocks are free and its counts are final.

    ``usage`` is null when the replica does not know the request (never arrived, refused, or long gone) or
    when the engine did not confirm the end in time.
    """

    request_id: str
    usage: RecentUsage | None = None


class RecentUsages(msgspec.Struct, frozen=True, kw_only=True):
    replica_id: str
    started_at: float
    usages: list[RecentUsage]
    next_after: int


class BadReplicaMessageError(ValueError):
    """A replica's answer could not be decoded; the message names the field."""


_usage_decoder = msgspec.json.Decoder(TokenUsage)


def decode_usage(raw: bytes | msgspec.Raw) -> TokenUsage:
    """Decode a ``usage`` object.

    Raises:
        BadReplicaMessageError: when it is not one; a zero is a value, a missing count is an error.
    """
    try:
        return _usage_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise BadReplicaMessageError(f"usage: {error}") from error


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A replica says where it is, again and again; it counts as gone ``lease_s`` after it was last heard.

    ``instance`` tells one start of a replica from the next, and ``sent_at`` (Unix seconds) one message from
    the next, so that a message that was recorded is worth nothing later. ``weight`` is its share of the
    sessions beside the others'. ``is_leaving``: the lease ends now.
    """

    replica_id: str
    url: str
    models: list[str]
    weight: float
    instance: str
    sent_at: float
    lease_s: float
    is_leaving: bool = False


def sign_registration(body: bytes, pool_token: str) -> str:
    """What goes into :data:`SIGNATURE_HEADER`: an HMAC-SHA256 of ``body``, so that the pool token itself is
    never shown to whatever listens at a gateway's address.
    """
    return hmac.new(pool_token.encode(), b"registration\0" + body, hashlib.sha256).hexdigest()
