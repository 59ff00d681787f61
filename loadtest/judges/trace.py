"""A trace at a small model's scale, in the dialects of Mooncake's format that the judges read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtest.replay.trace import TraceEntry


def scaled(
    entries: Sequence[TraceEntry], source_block: int, block: int, speed: float, max_output_tokens: int
) -> list[TraceEntry]:
    """The same blocks, each of ``block`` tokens, ``speed`` times as fast, with answers cut as they were."""
    scale = block / source_block
    found = []
    for entry in entries:
        tail = entry.input_length - (len(entry.hash_ids) - 1) * source_block
        length = (len(entry.hash_ids) - 1) * block + max(1, math.ceil(tail * scale))
        answer = min(max_output_tokens, max(2, round(entry.output_length * scale)))
        found.append(
            msgspec.structs.replace(
                entry, timestamp=entry.timestamp / speed, input_length=length, output_length=answer
            )
        )
    return found


def write_whole(entries: Sequence[TraceEntry], path: Path) -> None:
    """Each request with its whole prompt."""
    _write(path, [_line(entry, entry.input_length, entry.hash_ids) for entry in entries])


def write_turns(entries: Sequence[TraceEntry], path: Path, block: int, run: str) -> list[str]:
    """Requests with a session as turns of one conversation: of later ones only what is new, as the judge
    sends what went before by itself.

    Returns:
        The names of the conversations, new in every ``run``.
    """
    known: dict[str, int] = {}
    lines = []
    for number, entry in enumerate(entries):
        session = f"{run}-{entry.session_id or number}"
        old = min(known.get(session, 0), len(entry.hash_ids) - 1)
        known[session] = len(entry.hash_ids) - 1
        line = _line(entry, entry.input_length - old * block, entry.hash_ids[old:])
        lines.append(line | {"session_id": session})
    _write(path, lines)
    return list(known)


def _line(entry: TraceEntry, input_length: int, hash_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "timestamp": round(entry.timestamp),
        "input_length": input_length,
        "output_length": entry.output_length,
        "hash_ids": list(hash_ids),
    }


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
