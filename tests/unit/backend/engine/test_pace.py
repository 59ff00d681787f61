from __future__ import annotations

from backend.engine.pace import LONE_STEPS, MAX_CROWD, MIN_PREFILL_TOKENS, PrefillPace


def pace_of(token_s: float, decode_step_s: float = 0.0, max_mixed_step_s: float = 0.2) -> PrefillPace:
    """One that has seen what prompt tokens and steps of decodes cost."""
    pace = PrefillPace(max_mixed_step_s)
    pace.observe(0, 512, 512 * token_s)
    if decode_step_s:
        pace.observe(4, 0, decode_step_s)
    return pace


def test_it_allows_what_the_machine_has_lately_computed_in_that_time() -> None:
    pace = PrefillPace(0.2)
    assert pace.allowance(1, 1) is None
    pace.observe(0, 512, 1.024)
    assert pace.allowance(1, 1) == 96
    for _ in range(30):
        pace.observe(0, 96, 0.384)
    assert pace.allowance(1, 1) == 48


def test_what_decodes_take_is_not_charged_to_prefill() -> None:
    pace = pace_of(0.002, decode_step_s=0.04)
    assert pace.allowance(4, 1) == 80
    for _ in range(30):
        pace.observe(4, 80, 80 * 0.002 + 0.04)
    assert pace.allowance(4, 1) == 80


def test_prefill_gets_as_long_as_decodes_take_where_these_take_all_the_time() -> None:
    assert pace_of(0.004, decode_step_s=0.4).allowance(8, 1) == 96


def test_alone_a_step_may_take_longer() -> None:
    assert pace_of(0.002).allowance(0, 1) == int(0.2 * LONE_STEPS / 0.002) // 16 * 16


def test_more_who_wait_for_their_first_token_than_for_their_next_make_steps_longer() -> None:
    pace = pace_of(0.002)
    assert pace.allowance(2, 3) == 144
    assert pace.allowance(1, 9) == int(0.2 * MAX_CROWD / 0.002) // 16 * 16
    assert pace.allowance(9, 1) == 96


def test_it_never_stops_prefill() -> None:
    assert pace_of(0.02, max_mixed_step_s=0.001).allowance(1, 1) == MIN_PREFILL_TOKENS


def test_a_few_prompt_tokens_say_nothing() -> None:
    pace = PrefillPace(0.2)
    pace.observe(8, 2, 10.0)
    assert pace.allowance(1, 1) is None


def test_zero_is_no_limit() -> None:
    assert pace_of(0.002, max_mixed_step_s=0.0).allowance(1, 1) is None
