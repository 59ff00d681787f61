from __future__ import annotations

from backend.engine.pace import MIN_PREFILL_TOKENS, PrefillPace


def test_it_allows_what_the_machine_has_lately_computed_in_that_time() -> None:
    pace = PrefillPace(0.2)
    assert pace.allowance() is None
    pace.observe(512, 1.024)
    assert pace.allowance() == 96
    for _ in range(30):
        pace.observe(96, 0.384)
    assert pace.allowance() == 48


def test_it_never_stops_prefill() -> None:
    pace = PrefillPace(0.001)
    pace.observe(512, 10.0)
    assert pace.allowance() == MIN_PREFILL_TOKENS


def test_steps_of_a_few_decodes_say_nothing() -> None:
    pace = PrefillPace(0.2)
    pace.observe(8, 10.0)
    assert pace.allowance() is None


def test_zero_is_no_limit() -> None:
    pace = PrefillPace(0.0)
    pace.observe(512, 1.0)
    assert pace.allowance() is None
