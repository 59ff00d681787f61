"""Traces in Mooncake's format: one JSON object a line, with hash ids of prefix blocks.

``timestamp`` is in milliseconds from the start, ``input_length`` and ``output_length`` in tokens. Each of
``hash_ids`` stands for a block of ``block_tokens`` tokens and all before it; the last may be partial.
Format: Mooncake, FAST'25 release (kvcache-ai/Mooncake).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from simulator.requests import SimulatedRequest

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A line that is no request; the message names file, line and field."""


class TraceEntry(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Iterator[TraceEntry]:
    """The entries of a file, checked.

    Raises:
        TraceError: a line that is not an entry, or whose lengths and hash ids contradict each other.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(TraceEntry)
    last = 0.0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}:{number}: {error}") from None
            problem = _problem(entry, block_tokens, last)
            if problem:
                raise TraceError(f"{path}:{number}: {problem}")
            last = entry.timestamp
            yield entry


def _problem(entry: TraceEntry, block_tokens: int, last_timestamp: float) -> str:
    if entry.input_length < 1:
        return f"input_length: must be at least 1, not {entry.input_length}"
    if entry.output_length < 0:
        return f"output_length: must not be negative, but is {entry.output_length}"
    if entry.timestamp < last_timestamp:
        return f"timestamp: {entry.timestamp} comes after {last_timestamp}; sort the trace by time"
    num_blocks = -(-entry.input_length // block_tokens)
    if len(entry.hash_ids) != num_blocks:
        return (
            f"hash_ids: {len(entry.hash_ids)} of them, but {entry.input_length} tokens are {num_blocks} "
            f"blocks of {block_tokens}"
        )
    return ""


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is bent: ``speed`` 2 sends everything twice as fast, ``max_requests`` ends it early,
    ``length`` 0.1 makes blocks (and so prompts and answers) a tenth as long with the same sharing.
    """

    speed: float = 1.0
    max_requests: int | None = None
    length: float = 1.0


class TraceWorkload:
    """A trace, open loop: requests come when the trace says, whatever becomes of them.

    The second block is the affinity key: in a trace without sessions it is the closest there is to one, since
    the first is the same for everyone who uses the same system prompt.
    """

    def __init__(self, path: Path, scale: TraceScale, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> None:
        self._entries = read_trace(path, block_tokens)
        self._scale = scale
        self._source_block_tokens = block_tokens
        self.block_tokens = max(1, round(block_tokens * scale.length))
        self._num_sent = 0

    def next_arrival(self) -> SimulatedRequest | None:
        """The next line. Raises as :func:`read_trace` does."""
        limit = self._scale.max_requests
        if limit is not None and self._num_sent >= limit:
            return None
        entry = next(self._entries, None)
        if entry is None:
            return None
        self._num_sent += 1
        return self._request(entry)

    def next_turn(self, answered: SimulatedRequest, now_s: float) -> None:
        """Nothing follows from an answer."""

    def _request(self, entry: TraceEntry) -> SimulatedRequest:
        request = request_of(entry, self._num_sent - 1)
        request.arrival_s /= self._scale.speed
        if self.block_tokens == self._source_block_tokens:
            num_full = request.prompt_tokens // self.block_tokens
        else:
            num_full, rest = divmod(request.prompt_tokens, self._source_block_tokens)
            ratio = self.block_tokens / self._source_block_tokens
            rest = min(round(rest * ratio), self.block_tokens - 1)
            request.prompt_tokens = max(1, num_full * self.block_tokens + rest)
            request.output_tokens = max(1, round(request.output_tokens * ratio))
        request.digests = request.digests[:num_full]
        return request


def request_of(entry: TraceEntry, index: int) -> SimulatedRequest:
    """An entry as a request with a digest for every block, the last and partial one too."""
    ids = entry.hash_ids
    return SimulatedRequest(
        index=index,
        arrival_s=entry.timestamp / 1000.0,
        account="trace",
        key=str(ids[1] if len(ids) > 1 else ids[0]),
        digests=[hash_id.to_bytes(8, "big") for hash_id in ids],
        prompt_tokens=entry.input_length,
        output_tokens=max(1, entry.output_length),
    )
