"""Simulated sessions: repeatable, closed loop, each turn's prompt begins with all before it."""

from __future__ import annotations

import itertools
import statistics

import pytest

from simulator.requests import SimulatedRequest
from simulator.sessions import SessionShape, SessionWorkload


def play(workload: SessionWorkload) -> list[list[SimulatedRequest]]:
    """All turns of all sessions; an answer takes a second."""
    sessions = []
    while (first := workload.next_arrival()) is not None:
        turns = [first]
        while (later := workload.next_turn(turns[-1], turns[-1].arrival_s + 1.0)) is not None:
            turns.append(later)
        sessions.append(turns)
    return sessions


def test_equal_seeds_give_equal_sessions() -> None:
    shape = SessionShape(num_sessions=20, sessions_per_s=1.0)
    one, two, other = (
        [
            (turn.arrival_s, turn.prompt_tokens)
            for turns in play(SessionWorkload(shape, seed))
            for turn in turns
        ]
        for seed in (1, 1, 2)
    )
    assert one == two
    assert one != other


def test_a_turn_begins_with_everything_before_it() -> None:
    shape = SessionShape(num_sessions=30, sessions_per_s=1.0, num_accounts=3)
    sessions = play(SessionWorkload(shape, 1))
    for turns in sessions:
        assert turns[0].is_opening
        for before, after in itertools.pairwise(turns):
            assert not after.is_opening
            assert after.arrival_s > before.arrival_s
            assert after.prompt_tokens > before.num_tokens
            assert list(after.digests[: len(before.digests)]) == list(before.digests)
    num_shared = shape.shared_tokens // shape.block_tokens
    for other in range(1, 6):
        same_account = other % 3 == 0
        shared = [a == b for a, b in zip(sessions[0][0].digests, sessions[other][0].digests, strict=False)]
        assert shared[:num_shared] == [same_account] * num_shared
        assert not any(shared[num_shared:])


def test_means_are_what_was_asked_for() -> None:
    shape = SessionShape(num_sessions=3000, sessions_per_s=4.0, mean_turns=5.0, mean_think_s=0.0)
    workload = SessionWorkload(shape, 3)
    sessions = play(workload)
    assert workload.num_open == 0
    assert abs(statistics.mean(len(turns) for turns in sessions) - 5.0) < 0.4
    assert abs(sessions[-1][0].arrival_s / len(sessions) - 0.25) < 0.02


@pytest.mark.parametrize("name", ["num_sessions", "mean_output_tokens", "block_tokens", "num_accounts"])
def test_impossible_shapes_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SessionShape(**{"num_sessions": 1, "sessions_per_s": 1.0, name: 0})
    with pytest.raises(ValueError, match="sessions_per_s"):
        SessionShape(num_sessions=1, sessions_per_s=0)
    with pytest.raises(ValueError, match="mean_turns"):
        SessionShape(num_sessions=1, sessions_per_s=1, mean_turns=0.5)
