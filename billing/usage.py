"""What was consumed, by whom, once.

A :class:`UsageRecord` is the immutable fact that everything about money derives from. The edge makes one per
served request, under an id that it drew at admission; the engine's token counts are the only authority for
its figures. ``prompt_tokens`` includes the cached ones, whatever outward API a client spoke.
"""

from __future__ import annotations

import os
from typing import Literal, get_args

import msgspec

Surface = Literal["run", "v1", "binding", "batch"]
Status = Literal["ok", "client_disconnected", "replica_lost", "timeout", "error"]

STATUSES: tuple[Status, ...] = get_args(Status)

MAX_TOKENS = 2**31 - 1
_DIGEST_CHARS = 64

_KNOWN_STATUSES = frozenset(STATUSES)
_KNOWN_SURFACES: frozenset[Surface] = frozenset(get_args(Surface))

CHARGED_STATUSES: frozenset[Status] = frozenset({"ok", "client_disconnected"})
"""A client that left pays for what was generated; a failure of ours is recorded and costs nothing."""


class InvalidUsageError(ValueError):
    """A usage record that cannot be true, such as more cached than prompt tokens."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One served request. Instants and durations are integer microseconds, UTC. Never holds a prompt.

    A record that makes no sense cannot be built or decoded: InvalidUsageError names the field.

    Attributes:
        request_id: drawn by the edge at admission (:func:`new_request_id`); also the transaction's id.
        account_id: 32 hex characters; who pays.
        token_id: id of the API token that was shown, never the token itself.
        model: catalog id that ran; what is billed.
        requested_model: the id or alias that the client asked for.
        surface: which API the request came through.
        replica_id: replica that produced the answer, or the last one tried.
        session: the affinity value that the client sent, or "".
        started_at_us: admission; decides which rate card applies.
        finished_at_us: end of the answer.
        prompt_tokens: includes ``cached_prompt_tokens``.
        cached_prompt_tokens: served from the prefix cache at first admission; what the discount applies to.
        completion_tokens: generated tokens, reasoning among them.
        reasoning_tokens: part of ``completion_tokens``.
        status: how the request ended; decides with :attr:`is_charged` whether it costs anything.
        is_estimated: the replica gave no usage and the counts are the edge's own estimate.
        ttft_us: time to the first token of a stream; 0 for answers in one piece, and when there was none.
        num_attempts: replicas tried, at least 1.
        free_neurons_e4: ten-thousandths of a neuron that the account's daily free allocation covered.
        num_cached_blocks: blocks of the prefix cache that the cached tokens came from.
        cache_head: digest of the last of them (64 hexadecimal characters), which chains over all; "" without.
    """

    request_id: str
    account_id: str
    token_id: str
    model: str
    requested_model: str
    surface: Surface
    replica_id: str = ""
    session: str = ""
    started_at_us: int
    finished_at_us: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    status: Status = "ok"
    is_estimated: bool = False
    ttft_us: int = 0
    num_attempts: int = 1
    free_neurons_e4: int = 0
    num_cached_blocks: int = 0
    cache_head: str = ""

    def __post_init__(self) -> None:
        is_counted = (
            0 <= self.cached_prompt_tokens <= self.prompt_tokens <= MAX_TOKENS
            and 0 <= self.completion_tokens <= MAX_TOKENS
            and 0 <= self.reasoning_tokens <= MAX_TOKENS
            and self.free_neurons_e4 >= 0
            and 0 <= self.num_cached_blocks <= self.cached_prompt_tokens
            and len(self.cache_head) == (_DIGEST_CHARS if self.num_cached_blocks else 0)
        )
        if not (
            is_counted
            and self.request_id
            and self.account_id
            and self.model
            and self.status in _KNOWN_STATUSES
            and self.surface in _KNOWN_SURFACES
        ):
            raise InvalidUsageError(_problem_of(self))

    @property
    def is_charged(self) -> bool:
        return self.status in CHARGED_STATUSES


def _problem_of(record: UsageRecord) -> str:
    for name in ("request_id", "account_id", "model"):
        if not getattr(record, name):
            return f"{name} is empty"
    for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "reasoning_tokens"):
        count = getattr(record, name)
        if not 0 <= count <= MAX_TOKENS:
            return f"{name} is {count}, not between 0 and {MAX_TOKENS}"
    if record.cached_prompt_tokens > record.prompt_tokens:
        return (
            f"cached_prompt_tokens {record.cached_prompt_tokens} exceed prompt_tokens {record.prompt_tokens}"
        )
    if record.free_neurons_e4 < 0:
        return f"free_neurons_e4 is {record.free_neurons_e4}, less than 0"
    if not 0 <= record.num_cached_blocks <= record.cached_prompt_tokens:
        return f"num_cached_blocks is {record.num_cached_blocks}, not between 0 and the cached tokens"
    if len(record.cache_head) != (_DIGEST_CHARS if record.num_cached_blocks else 0):
        return "cache_head is no digest of the last cached block"
    if record.status not in _KNOWN_STATUSES:
        return f"status is {record.status!r}, not one of {', '.join(STATUSES)}"
    return f"surface is {record.surface!r}, not one of {', '.join(sorted(_KNOWN_SURFACES))}"


_RANDOM_DIGITS = 20
_IDS_PER_FETCH = 200

_VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
"""The two fixed bits of a UUID, around two random ones."""


def new_request_id(now_us: int) -> str:
    """A fresh UUID of version 7: unique, and ordered by ``now_us`` to the millisecond.

    The order matters: rows keyed by it are appended to the end of their index, which makes posting several
    times cheaper than random ids do. Any other unique string is accepted by the ledger as well.
    """
    return _request_id(now_us, os.urandom(_RANDOM_DIGITS // 2).hex())


class RequestIds:
    """Draws what :func:`new_request_id` does, with randomness that is fetched for many at once.

    A system call each would cost more than the rest of it, and would let another thread take the interpreter
    in the middle of a request. Belongs to one thread.
    """

    def __init__(self) -> None:
        self._digits = ""
        self._used = 0

    def draw(self, now_us: int) -> str:
        """A fresh id, as :func:`new_request_id` makes it."""
        start = self._used
        if start == len(self._digits):
            self._digits = os.urandom(_IDS_PER_FETCH * _RANDOM_DIGITS // 2).hex()
            start = 0
        self._used = start + _RANDOM_DIGITS
        return _request_id(now_us, self._digits[start : self._used])


def _request_id(now_us: int, random: str) -> str:
    head = f"{now_us // 1000 & 0xFFFF_FFFF_FFFF:012x}"
    return f"{head[:8]}-{head[8:]}-7{random[:3]}-{_VARIANTS[random[3]]}{random[4:7]}-{random[7:19]}"
