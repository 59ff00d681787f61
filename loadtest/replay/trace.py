"""Traces in Mooncake's format: read, checked, or made up where there is none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

MOONCAKE_BLOCK_TOKENS = 512
"""What a hash id stands for in the published traces."""


class TraceError(ValueError):
    """A line that is no request; the message names file, line and field."""


class TraceEntry(msgspec.Struct, frozen=True):
    """One line: ``timestamp`` in ms from the start, lengths in tokens, an id for each block of the prompt and
    all before it; the last block may be partial. ``session_id`` is an extension of recorded traces.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str = ""

    @property
    def affinity(self) -> str:
        """The session; where the trace has none, its second block, which is the closest to one: the first
        is the same for everyone with the same system prompt."""
        if self.session_id:
            return self.session_id
        return str(self.hash_ids[1] if len(self.hash_ids) > 1 else self.hash_ids[0])


def read_trace(path: Path, block_tokens: int, max_requests: int) -> list[TraceEntry]:
    """The first entries of a file.

    Raises:
        TraceError: a line that is no entry, or whose lengths and ids contradict each other.
        OSError: the file cannot be read.
    """
    entries: list[TraceEntry] = []
    decoder = msgspec.json.Decoder(TraceEntry)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if len(entries) >= max_requests:
                break
            if not line.strip():
                continue
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}:{number}: {error}") from None
            problem = _problem(entry, block_tokens, entries[-1].timestamp if entries else 0.0)
            if problem:
                raise TraceError(f"{path}:{number}: {problem}")
            entries.append(entry)
    if not entries:
        raise TraceError(f"{path}: there is no request in it")
    return entries


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
            f"blocks of {block_tokens} (set --block-tokens to what an id stands for)"
        )
    return ""


def synthetic_trace(num_requests: int, seed: int, mean_gap_ms: float = 4000.0) -> list[TraceEntry]:
    """Agents that share a system prompt of two blocks and resend growing conversations, at random times."""
    rng = random.Random(seed)
    moments: list[tuple[float, int]] = []
    turns, session, start = 5, 0, 0.0
    while len(moments) < num_requests:
        start += rng.expovariate(1.0 / (mean_gap_ms * turns))
        at = start
        for _ in range(turns):
            moments.append((at, session))
            at += rng.uniform(2, 8) * mean_gap_ms
        session += 1
    return list(_entries(sorted(moments)[:num_requests], rng))


def _entries(moments: list[tuple[float, int]], rng: random.Random) -> Iterator[TraceEntry]:
    chains: dict[int, list[int]] = {}
    next_id = 2
    first = moments[0][0] if moments else 0.0
    for at, session in moments:
        chain = chains.setdefault(session, [0, 1])
        num_new = rng.randint(2, 5)
        chain += range(next_id, next_id + num_new)
        next_id += num_new
        tail = rng.randint(1, MOONCAKE_BLOCK_TOKENS - 1)
        yield TraceEntry(
            timestamp=round(at - first, 1),
            input_length=len(chain) * MOONCAKE_BLOCK_TOKENS + tail,
            output_length=rng.randint(64, 512),
            hash_ids=[*chain, next_id],
            session_id=f"s{session}",
        )
        next_id += 1
