"""What crosses the line between the HTTP process of a replica and its engine process.

A leaf module: no torch, no sockets. Frames are msgpack arrays (:mod:`backend.engine.frames`); both ends are
always the same version of the code, so fields may change freely.

========================  ================================================================================
towards the engine        :class:`Configure` (once, first), :class:`SequenceRequest`, :class:`AbortSequences`;
                          :class:`BeginImport`, :class:`PutBlocks`, :class:`EndImport`, :class:`FreeSlots`,
                          :class:`EndExport`
from the engine           :class:`StartProgress`, then :class:`EngineInfo` or :class:`StartFailed`, then one
                          :class:`StepOutputs` per step; :class:`TransferReport` where blocks are exchanged
========================  ================================================================================
"""

from __future__ import annotations

from typing import Literal

import msgspec

from backend.config import BackendConfig
from backend.transfer.payload import KvLayout

SequenceFinish = Literal["stop", "length", "abort", "error"]

RefusalCode = Literal["context_length_exceeded", "invalid_request", "queue_full", "queue_timeout", "busy"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the next token of one sequence is chosen.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` (64 bits) None
    draws a fresh one; with a seed the tokens are the same whatever else is in the batch (give the choices of
    one request ``seed + index``). ``frequency_penalty`` and ``presence_penalty`` look at generated tokens,
    ``repetition_penalty`` at the prompt too. ``num_logprobs`` None asks for no log probabilities, 0 for those
    of the chosen tokens only, N for the N likeliest as well; they are the log-softmax of the model's own
    logits, before bias, penalties and temperature. ``max_tokens`` counts generated tokens, at least 1.
    ``grammar`` (in a form of llguidance) holds the generated tokens to it: the sequence stops when it is
    complete, or at an end-of-sequence token where it could be; it does not go with ``ignore_eos``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An image that stands behind a run of placeholder tokens of a prompt.

    ``start`` is the index of the first of its ``num_tokens`` tokens. ``patches`` are ``rows * columns``
    patches of 3 colour planes of bytes, as :class:`backend.text.images.ImagePatches` has them, and
    ``digest`` (SHA-256) names their content.
    """

    start: int
    num_tokens: int
    rows: int
    columns: int
    patches: bytes
    digest: bytes

    @property
    def end(self) -> int:
        """The index behind its last token."""
        return self.start + self.num_tokens


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="request"):
    """One sequence to generate. A request with ``n`` choices is ``n`` sequences of the same prompt.

    ``sequence_id`` comes from :meth:`backend.engine.client.EngineClient.new_sequence_id`. ``cache_salt``
    roots the block hashes: only sequences with the same salt share cached blocks. ``block_extras`` are
    further bytes of the hash of single prompt blocks by block index (digests of what a placeholder token
    stands for). ``media`` are the images of the prompt, in order; their digests are in the hashes of the
    blocks that they touch without being named in ``block_extras``. ``reject_if_busy`` refuses the sequence
    when it would have to wait for a place in the batch.

    ``exports_from``: the full blocks of the prompt from this one on are put out for another replica as they
    are done. ``told_cached_tokens``: another replica computed the prompt and found so many tokens of it
    cached; that is what counts then, whatever is found here. ``lease_id`` is an import whose blocks are kept
    until the sequence is admitted.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: bytes = b""
    block_extras: dict[int, bytes] = {}
    reject_if_busy: bool = False
    media: tuple[MediaSpan, ...] = ()
    exports_from: int | None = None
    told_cached_tokens: int | None = None
    lease_id: int = 0


class AbortSequences(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop these sequences; unknown and finished ones are ignored."""

    sequence_ids: list[int]


class BeginImport(msgspec.Struct, frozen=True, array_like=True, tag="begin-import"):
    """Make ready for the blocks ``digests`` of a prompt; those that are here already are kept."""

    lease_id: int
    digests: list[bytes]


class PutBlocks(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Records of the next blocks of an import lie in these slots of the exchange, whole and checked."""

    lease_id: int
    slots: list[int]


class EndImport(msgspec.Struct, frozen=True, array_like=True, tag="end-import"):
    """The import is over, however it went: nothing is kept for it any more."""

    lease_id: int


class FreeSlots(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """What was put out in these slots was taken."""

    slots: list[int]


class EndExport(msgspec.Struct, frozen=True, array_like=True, tag="end-export"):
    """Nobody takes the blocks of this sequence any more."""

    sequence_id: int


class Configure(msgspec.Struct, frozen=True, array_like=True, tag="configure"):
    """The first frame: what to load."""

    config: BackendConfig


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability (natural) of one generated token, and the likeliest tokens at its position in order."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """New tokens of one sequence; the one with a ``finish_reason`` is its last.

    ``token_ids`` are all generated tokens, to be counted as completion tokens. With ``finish_reason`` "stop"
    the last of them is the stop token (end of sequence or one of ``stop_token_ids``), which is not text,
    unless ``is_last_text``: the sequence's grammar was complete with it.
    ``logprobs`` has one entry per token when asked for. ``cached_prompt_tokens`` was fixed at first admission
    (0 for a sequence that ended before it); ``cached_head`` is the digest of the last block that they came
    from, told once with the first output. ``queue_wait_s``: from arrival to first admission.
    ``refusal`` is set when the sequence was never admitted, ``message`` says why in one sentence (also for
    "error").
    """

    sequence_id: int
    token_ids: list[int] = []
    finish_reason: SequenceFinish | None = None
    is_last_text: bool = False
    cached_prompt_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    queue_wait_s: float = 0.0
    refusal: RefusalCode | None = None
    message: str = ""
    cached_head: bytes = b""


class TierStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Of the tiers below the KV cache. ``queries`` are prompt tokens that were looked up in them, ``hits``
    those that were loaded. ``num_demoted`` blocks went down, ``num_from_host`` and ``num_from_disk`` came up.
    ``num_refused`` times loading was expected to cost more than computing; ``num_ended_early`` loads were
    given up, too late or wrong. ``num_corrupt`` blocks of the disk failed their check, ``num_dropped`` were
    not written as the queue or the disk was full.
    """

    queries: int
    hits: int
    num_demoted: int
    num_from_host: int
    num_from_disk: int
    num_refused: int
    num_ended_early: int
    num_host_bytes: int
    num_disk_bytes: int
    num_corrupt: int
    num_disk_failures: int
    num_dropped: int
    is_disk_writable: bool


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Gauges as of the last step, and counters since the start of the engine.

    ``num_draft_tokens`` were guessed, and of those ``num_right_draft_tokens`` were what the model said.
    ``num_kv_mismatches``: sequences that were ended because a block did not hold what they had put there.
    ``num_blocks`` = free + cached + used; cached blocks hold reusable KV that nobody reads at the moment.
    ``prompt_tokens`` and ``cached_prompt_tokens`` count at first admission, so that their ratio is the hit
    rate; ``computed_tokens`` counts every token that went through the model, again after a preemption too.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: int = 0
    num_preemptions: int = 0
    num_requests: int = 0
    num_aborts: int = 0
    num_refusals: int = 0
    num_evictions: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    num_draft_tokens: int = 0
    num_right_draft_tokens: int = 0
    num_kv_mismatches: int = 0
    num_blocks_exported: int = 0
    num_blocks_imported: int = 0
    num_held_blocks: int = 0
    tiers: TierStats | None = None


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """All that one step produced, in one frame."""

    outputs: list[TokenOutput]
    stats: EngineStats


class ExportedBlock(msgspec.Struct, frozen=True, array_like=True):
    """The record of block ``index`` of a sequence lies in ``slot``, ``num_bytes`` long. ``cached_tokens`` of
    the prompt were found at its first admission, None before that.
    """

    sequence_id: int
    index: int
    slot: int
    num_bytes: int
    cached_tokens: int | None


class ImportStep(msgspec.Struct, frozen=True, array_like=True):
    """How far an import is: ``num_blocks`` of the prompt are here and kept; ``slots`` can be filled again.
    ``failure`` ends it: what is here stays only as other cached blocks do.
    """

    lease_id: int
    num_blocks: int
    slots: list[int] = []
    failure: str = ""


class TransferReport(msgspec.Struct, frozen=True, array_like=True, tag="transfers"):
    """What became of blocks on their way. ``ended_exports`` could not be completed, by sequence."""

    exported: list[ExportedBlock]
    imports: list[ImportStep]
    ended_exports: list[int]


class ExchangeInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The memory through which blocks leave and enter an engine: ``num_slots`` slots of ``slot_bytes`` in a
    file that processes of this user on this machine can open at ``path``. The engine fills the first
    ``num_outgoing`` of them, the HTTP process the others. The file begins with ``proof``, by which who opens
    it knows that it is the right one.
    """

    path: str
    proof: bytes
    slot_bytes: int
    num_slots: int
    num_outgoing: int
    layout: KvLayout


class StartProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """``fraction`` is 0 to 1 of the start, ``stage`` a few words for people."""

    fraction: float
    stage: str


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine could not start; ``message`` names what to fix."""

    message: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The engine is ready. Lengths in tokens; the KV pool holds ``num_blocks * block_size`` of them."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    device: str
    max_running: int
    max_waiting: int
    has_vision: bool = False
    exchange: ExchangeInfo | None = None


ToExchange = BeginImport | PutBlocks | EndImport | FreeSlots | EndExport
ToEngine = Configure | SequenceRequest | AbortSequences | ToExchange
FromEngine = StartProgress | StartFailed | EngineInfo | StepOutputs | TransferReport
