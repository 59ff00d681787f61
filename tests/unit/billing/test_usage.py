from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from billing.usage import STATUSES, InvalidUsageError, RequestIds, UsageRecord, new_request_id
from tests.support.ledger import NOON_US, record


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cached_prompt_tokens": 1_001}, "cached_prompt_tokens 1001 exceed prompt_tokens 1000"),
        ({"prompt_tokens": -1, "cached_prompt_tokens": -1}, "prompt_tokens is -1"),
        ({"cached_prompt_tokens": -1}, "cached_prompt_tokens is -1"),
        ({"completion_tokens": -5}, "completion_tokens is -5"),
        ({"completion_tokens": 2**31}, "completion_tokens is 2147483648"),
        ({"reasoning_tokens": -1}, "reasoning_tokens is -1"),
        ({"free_neurons_e4": -1}, "free_neurons_e4 is -1"),
        ({"num_cached_blocks": 801}, "num_cached_blocks is 801"),
        ({"num_cached_blocks": 1}, "cache_head is no digest"),
        ({"cache_head": "00" * 32}, "cache_head is no digest"),
        ({"request_id": ""}, "request_id is empty"),
        ({"account_id": ""}, "account_id is empty"),
        ({"model": ""}, "model is empty"),
        ({"status": "fine"}, "status is 'fine'"),
        ({"surface": "fax"}, "surface is 'fax'"),
    ],
)
def test_a_record_that_cannot_be_true_cannot_be_built(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidUsageError, match=named):
        record(**changes)


def test_nor_can_it_be_decoded() -> None:
    damaged = msgspec.to_builtins(record()) | {"cached_prompt_tokens": 2_000}
    with pytest.raises(msgspec.ValidationError, match="exceed prompt_tokens"):
        msgspec.convert(damaged, UsageRecord)


def test_a_record_from_before_free_neurons_and_cached_blocks_can_still_be_read() -> None:
    added = {"free_neurons_e4", "num_cached_blocks", "cache_head"}
    old = {name: value for name, value in msgspec.to_builtins(record()).items() if name not in added}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=UsageRecord) == record()


def test_zero_tokens_are_a_value() -> None:
    """BR-19: an explicit zero from the engine is no missing value, and nothing is estimated in its place."""
    nothing = record(prompt_tokens=0, cached_prompt_tokens=0, completion_tokens=0)
    assert (nothing.prompt_tokens, nothing.completion_tokens, nothing.is_estimated) == (0, 0, False)


def test_only_failures_of_ours_are_free() -> None:
    charged = {status for status in STATUSES if record(status=status).is_charged}
    assert charged == {"ok", "client_disconnected"}


@pytest.mark.parametrize("draw", [new_request_id, RequestIds().draw])
def test_request_ids_are_version_7_uuids(draw: Callable[[int], str]) -> None:
    text = draw(NOON_US)
    assert len(text) == 36
    assert [text[position] for position in (8, 13, 18, 23)] == ["-"] * 4
    assert text[14] == "7"
    assert text[19] in "89ab"
    assert int(text[:8] + text[9:13], 16) == NOON_US // 1_000


@pytest.mark.parametrize("draw", [new_request_id, RequestIds().draw])
def test_request_ids_never_repeat_and_follow_the_clock(draw: Callable[[int], str]) -> None:
    """BR-21: the ledger's key is drawn at admission and unique, whatever a stream contains."""
    same_instant = {draw(NOON_US) for _ in range(10_000)}
    assert len(same_instant) == 10_000
    in_order = [draw(NOON_US + 1_000 * step) for step in range(100)]
    assert in_order == sorted(in_order)
