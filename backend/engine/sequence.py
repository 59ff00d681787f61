"""One sequence on its way through the engine: its tokens, those of them that have KV, its blocks."""

from __future__ import annotations

import enum
import struct

from backend.engine.messages import MediaSpan, SamplingParams, SequenceFinish, SequenceRequest

_SPAN = struct.Struct("<qI")


class InvariantError(Exception):
    """The engine's books do not add up: a defect, after which nothing it computes can be trusted."""


def expect(is_right: bool, otherwise: str) -> None:
    """Raise :class:`InvariantError` saying ``otherwise`` unless ``is_right``."""
    if not is_right:
        raise InvariantError(otherwise)


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    """In the queue, new or preempted: holds no blocks."""
    RUNNING = "running"
    """In the batch: holds a block for every token that has KV."""
    FINISHED = "finished"


class Sequence:
    """Mutable state of one sequence; the scheduler is the only one that changes it.

    ``token_ids`` is the prompt and then what was generated. ``num_computed_tokens`` of them have KV, in the
    blocks of ``block_table``, whose contents ``block_tags`` name one by one (empty where nobody checks
    them); at least one known token never has, as its logits are still to come.
    ``block_hashes`` are the chained digests of the first full blocks, as far as they were needed yet, and
    ``num_registered_blocks`` of them are in the prefix cache's hands.

    ``cached_prompt_tokens`` is None until the first admission and never changes after it, whatever happens to
    the blocks later: it is what the customer's discount applies to. Where another replica computed the
    prompt, it is what was found there (``told_cached_tokens``).
    """

    __slots__ = (
        "arrived_at_s",
        "block_extras",
        "block_hashes",
        "block_table",
        "block_tags",
        "cache_salt",
        "cached_prompt_tokens",
        "finish_reason",
        "media",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "queue_wait_s",
        "sampling",
        "sequence_id",
        "status",
        "stop_token_ids",
        "token_ids",
        "told_cached_tokens",
    )

    def __init__(
        self, request: SequenceRequest, *, eos_token_ids: tuple[int, ...] = (), arrived_at_s: float = 0.0
    ) -> None:
        sampling = request.sampling
        self.sequence_id = request.sequence_id
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling: SamplingParams = sampling
        eos = () if sampling.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(eos).union(sampling.stop_token_ids)
        self.cache_salt = request.cache_salt
        self.block_extras = request.block_extras
        self.media = request.media
        self.told_cached_tokens = request.told_cached_tokens
        self.arrived_at_s = arrived_at_s
        self.queue_wait_s: float | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: SequenceFinish | None = None
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.block_tags: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.cached_prompt_tokens: int | None = None

    @property
    def num_media_bytes(self) -> int:
        """Bytes of pixels that the sequence holds."""
        return sum(len(span.patches) for span in self.media)

    def media_between(self, start: int, end: int) -> tuple[MediaSpan, ...]:
        """The images that tokens ``start .. end-1`` stand for, all or in part."""
        if not self.media:
            return ()
        return tuple(span for span in self.media if span.start < end and start < span.end)

    def extra_of_block(self, index: int, block_size: int) -> bytes:
        """what token ids do not say of a block: which images its placeholders stand for, and which part."""
        extra = self.block_extras.get(index, b"")
        start = index * block_size
        for span in self.media_between(start, start + block_size):
            extra += _SPAN.pack(span.start - start, span.num_tokens) + span.digest
        return extra

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens without KV: 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_computed_tokens
