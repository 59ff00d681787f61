"""Traces are read whole or refused by line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.trace import TraceError, TraceScale, TraceWorkload, read_trace


def write(path: Path, *entries: dict[str, Any] | str) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7], **changes}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", ":2: "),
        (entry(input_length=0), "input_length"),
        (entry(output_length=-1), "output_length"),
        (entry(timestamp=-1), "timestamp"),
        (entry(hash_ids=[0]), "hash_ids: 1 of them, but 600 tokens are 2 blocks of 512"),
        (entry(hash_ids="many"), "hash_ids"),
        ({"timestamp": 1}, "input_length"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: dict[str, Any] | str, message: str) -> None:
    path = write(tmp_path / "trace.jsonl", entry(), line)
    with pytest.raises(TraceError, match=message) as caught:
        list(read_trace(path))
    assert "trace.jsonl:2" in str(caught.value)


def test_a_scaled_trace_keeps_what_is_shared(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        entry(),
        "",
        entry(timestamp=1000, input_length=1500, output_length=50, hash_ids=[0, 1, 2]),
        entry(timestamp=2000),
    )
    workload = TraceWorkload(path, TraceScale(speed=2.0, max_requests=2, length=0.125))
    assert workload.block_tokens == 64
    first, second = workload.next_arrival(), workload.next_arrival()
    assert first is not None
    assert second is not None
    assert workload.next_arrival() is None
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (0.5, 128 + 60, 6)
    assert [len(each.digests) for each in (first, second)] == [1, 2]
    assert first.digests[0] == second.digests[0]
    assert (first.key, second.key) == ("7", "1")


def test_unscaled_lengths_are_the_traces_own(tmp_path: Path) -> None:
    workload = TraceWorkload(write(tmp_path / "trace.jsonl", entry(input_length=1024)), TraceScale())
    found = workload.next_arrival()
    assert found is not None
    assert (found.prompt_tokens, found.output_tokens, len(found.digests)) == (1024, 5, 2)
