"""A recorded trace shares what was cached, and names nobody."""

from __future__ import annotations

import msgspec

from billing.usage import UsageRecord
from billing.usage_trace import TraceLine, TraceRecorder

ACCOUNT = "0123456789abcdef0123456789abcdef"


def record(
    number: int, prompt: int, cached: int, *, session: str = "", account: str = ACCOUNT, head: str = ""
) -> UsageRecord:
    blocks = cached // 16
    return UsageRecord(
        request_id=f"request-{number}", account_id=account, token_id="token-1", model="m",
        requested_model="m", surface="v1", session=session, started_at_us=5_000_000 + number * 1000,
        finished_at_us=6_000_000 + number * 1000, prompt_tokens=prompt, cached_prompt_tokens=cached,
        completion_tokens=20, num_cached_blocks=blocks, cache_head=(head or "ab" * 32) if blocks else "",
    )  # fmt: skip


def recorded(*records: UsageRecord) -> tuple[list[TraceLine], TraceRecorder]:
    recorder = TraceRecorder(16)
    return list(recorder.lines(records)), recorder


def infinite_hits(lines: list[TraceLine]) -> int:
    """Tokens that a cache without end finds again, as readers of the format count them."""
    seen: set[int] = set()
    total = 0
    for line in lines:
        full = line.hash_ids[: line.input_length // 16]
        for hash_id in full:
            if hash_id not in seen:
                break
            total += 16
        seen.update(full)
    return total


def test_turns_of_a_session_share_what_was_cached() -> None:
    lines, recorder = recorded(
        record(0, 100, 0, session="a"), record(1, 50, 0, session="b"), record(2, 150, 96, session="a"),
        record(3, 210, 144, session="a"), record(4, 90, 48, session="b"),
    )  # fmt: skip
    assert [len(line.hash_ids) for line in lines] == [7, 4, 10, 14, 6]
    assert lines[2].hash_ids[:6] == lines[0].hash_ids[:6]
    assert lines[3].hash_ids[:9] == lines[2].hash_ids[:9]
    assert infinite_hits(lines) == recorder.shared_tokens == recorder.cached_tokens == 288
    assert [line.session_id for line in lines] == ["s0", "s1", "s0", "s0", "s1"]
    assert [line.timestamp for line in lines] == [0, 1, 2, 3, 4]
    assert [line.cached_length for line in lines] == [0, 0, 96, 144, 48]


def test_what_was_evicted_is_not_shared_in_the_trace_either() -> None:
    lines, recorder = recorded(record(0, 160, 0, session="a"), record(1, 200, 32, session="a"))
    assert infinite_hits(lines) == recorder.shared_tokens == 32


def test_a_new_session_shares_with_a_recent_prompt_of_its_account_only() -> None:
    lines, recorder = recorded(
        record(0, 100, 0, session="a"), record(1, 100, 0, session="z", account="f" * 32),
        record(2, 120, 64, session="b"), record(3, 120, 64, session="c"),
    )  # fmt: skip
    assert lines[2].hash_ids[:4] == lines[0].hash_ids[:4] == lines[3].hash_ids[:4]
    assert infinite_hits(lines) == recorder.shared_tokens == 128


def test_blocks_of_an_answer_are_counted_as_lost() -> None:
    _, recorder = recorded(record(0, 64, 0, session="a"), record(1, 160, 80, session="a"))
    assert (recorder.cached_tokens, recorder.shared_tokens) == (80, 64)


def test_a_turn_that_branches_from_an_older_prompt_of_its_session_finds_it() -> None:
    lines, recorder = recorded(
        record(0, 320, 0, session="a", head="aa" * 32),
        record(1, 40, 16, session="a", head="bb" * 32),
        record(2, 200, 160, session="a", head="cc" * 32),
    )
    assert lines[2].hash_ids[:10] == lines[0].hash_ids[:10]
    assert recorder.shared_tokens == infinite_hits(lines) == recorder.cached_tokens


def test_nothing_names_anybody() -> None:
    name = "secret-session"
    lines, _ = recorded(record(0, 100, 0, session=name), record(1, 130, 96, session=name))
    text = msgspec.json.encode(lines).decode()
    for secret in (name, ACCOUNT, "token-1", "request-", "ab" * 32):
        assert secret not in text
    assert set(msgspec.json.decode(text)[1]) == {
        "timestamp", "input_length", "output_length", "hash_ids", "session_id", "cached_length"
    }  # fmt: skip
