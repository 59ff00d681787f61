"""The nouns of the queue: batches, items, leases, outcomes."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from billing.usage import UsageRecord

Form = Literal["native", "openai"]
"""Whose form input and output have: Workers AI's ``requests`` or OpenAI's files of lines."""

BatchStatus = Literal["queued", "running", "cancelling", "completed", "failed", "expired", "cancelled"]
ItemState = Literal["queued", "leased", "succeeded", "failed", "expired", "cancelled"]

OPEN_STATUSES: tuple[BatchStatus, ...] = ("queued", "running", "cancelling")
"""Batches that have items to end."""

OPEN_STATES: tuple[ItemState, ...] = ("queued", "leased")

NATIVE_ENDPOINT = "/ai/run"


class NewItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item as it is submitted. ``reference`` is encoded JSON: the client's own name for it, or null."""

    body: bytes
    reference: bytes = b"null"


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A submission. ``problems`` make it fail at once, without items; ``metadata`` is encoded JSON."""

    id: str
    account_id: str
    token_id: str
    form: Form
    endpoint: str
    model: str = ""
    items: list[NewItem]
    input_file_id: str = ""
    metadata: bytes = b"null"
    problems: list[Problem] = []


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why an input file makes no batch. ``line`` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it stands in the store."""

    id: str
    account_id: str
    token_id: str
    form: Form
    endpoint: str
    model: str
    status: BatchStatus
    num_items: int
    input_file_id: str
    output_file_id: str
    error_file_id: str
    metadata: str
    problems: str
    created_at_us: int
    expires_at_us: int
    started_at_us: int | None
    cancelling_at_us: int | None
    ended_at_us: int | None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right of one worker to run one item until it expires. ``number`` tells it from every other lease of
    the item, so that it can be ended by the holder of the newest one only.
    """

    batch_id: str
    position: int
    number: int
    account_id: str
    token_id: str
    form: Form
    endpoint: str
    model: str
    prefix_group: str
    num_failures: int
    body: bytes
    reference: bytes
    created_at_us: int

    @property
    def key(self) -> tuple[str, int]:
        return self.batch_id, self.position

    @property
    def request_id(self) -> str:
        """The id of this attempt: the same whoever asks, and of no other attempt.

        A UUID of version 7 of the batch's time, whose other bits are a hash of the lease.
        """
        digest = hashlib.blake2b(f"{self.batch_id}/{self.position}/{self.number}".encode(), digest_size=10)
        bits = digest.hexdigest()
        head = f"{self.created_at_us // 1000 & 0xFFFF_FFFF_FFFF:012x}"
        variant = "89ab"[int(bits[3], 16) & 3]
        return f"{head[:8]}-{head[8:]}-7{bits[:3]}-{variant}{bits[4:7]}-{bits[7:19]}"


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an item ended: ``output`` in the form of its batch, and the usage record of one that succeeded."""

    lease: Lease
    is_success: bool
    output: bytes
    record: UsageRecord | None = None


class ItemCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Items of one batch by state."""

    queued: int = 0
    leased: int = 0
    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0

    @property
    def num_open(self) -> int:
        return self.queued + self.leased


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What the items of a batch used so far."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class BatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a batch's event log."""

    number: int
    type: str
    at_us: int
