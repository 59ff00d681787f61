"""The bill check finds what it is there to find."""

from __future__ import annotations

from typing import Any

from loadtest.bill_check import Question, compare, questions_of, text_of
from loadtest.exchange import Exchange
from loadtest.soak import Memory

WHOLE = Question(text=1, session="s", max_tokens=8, is_streamed=True, leave_after=None)
LEFT = Question(text=1, session="s", max_tokens=8, is_streamed=True, leave_after=2)


def exchange(**changes: Any) -> Exchange:
    fields = {
        "status": 200,
        "request_id": "r1",
        "prompt_tokens": 50,
        "cached_tokens": 32,
        "completion_tokens": 8,
    }
    return Exchange(**(fields | changes))


def row(request_id: str = "r1", **changes: int) -> dict[str, Any]:
    figures = {"prompt_tokens": 50, "cached_prompt_tokens": 32, "completion_tokens": 8}
    return {"request_id": request_id, **figures, **changes}


def problems(
    questions: list[Question], exchanges: list[Exchange], rows: list[dict[str, Any]], **total: int
) -> list[str]:
    names = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    sums = {name: sum(each[name] for each in rows) for name in names} | {"num_requests": len(rows)}
    return compare(questions, exchanges, {each["request_id"]: each for each in rows}, sums | total).problems


def test_figures_that_agree_are_no_problem() -> None:
    left = exchange(request_id="r2", has_left=True, num_pieces=2, prompt_tokens=0)
    assert problems([WHOLE, LEFT], [exchange(), left], [row(), row("r2", completion_tokens=3)]) == []


def test_every_figure_is_compared() -> None:
    for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens"):
        assert len(problems([WHOLE], [exchange()], [row(**{name: 1})])) == 1


def test_a_request_without_a_bill_and_a_bill_without_a_request_are_found() -> None:
    assert problems([WHOLE], [exchange()], []) == ["r1: served, and not billed"]
    assert problems([WHOLE], [exchange()], [row(), row("r9")]) == ["r9: billed, and never sent"]


def test_a_request_that_was_left_is_billed_for_its_prompt_and_for_what_came() -> None:
    left = exchange(request_id="r2", has_left=True, num_pieces=3, prompt_tokens=0)
    for changes in ({"prompt_tokens": 49}, {"completion_tokens": 2}, {"completion_tokens": 9}):
        found = problems([WHOLE, LEFT], [exchange(), left], [row(), row("r2", **changes)])
        assert len(found) == 1
        assert found[0].startswith("r2: left")


def test_sums_that_differ_from_their_rows_and_failures_are_found() -> None:
    assert len(problems([WHOLE], [exchange()], [row()], completion_tokens=9)) == 1
    assert problems([WHOLE], [Exchange(error="503: full")], []) == ["s: failed: 503: full"]


def test_questions_are_a_mixture_with_disconnects_only_in_streams() -> None:
    questions = questions_of(400, 0.2, 12, seed=1)
    left = [question for question in questions if question.leave_after]
    assert all(question.is_streamed for question in left)
    assert 30 < len(left) < 90
    assert any(not question.is_streamed for question in questions)
    assert len({text_of(number) for number in range(24)}) == 24


def test_memory_that_grows_has_a_slope_and_memory_that_does_not_has_none() -> None:
    times = [float(second) for second in range(0, 100, 2)]
    flat = Memory(times, [100 * 2**20] * 50)
    growing = Memory(times, [int((100 + second / 10) * 2**20) for second in times])
    assert (flat.slope_mib_per_hour(), flat.growth_mib()) == (0.0, 0.0)
    assert abs(growing.slope_mib_per_hour() - 360.0) < 1.0
    assert abs(growing.growth_mib() - 4.8) < 0.1
