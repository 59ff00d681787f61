"""The time of a step: fitted, with its error, never negative."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from simulator.step_time import (
    MeasuredStep,
    ProfileError,
    StepTime,
    attended,
    fit,
    read_profile,
    read_steps,
)

TRUE = StepTime(base_s=0.01, decode_s=0.002, prefill_s=0.0003, context_s=1e-6)
PROFILES = Path(__file__).parents[3] / "simulator" / "profiles"


def measured(noise: float, count: int = 60) -> list[MeasuredStep]:
    source = random.Random(4)
    steps = []
    for _ in range(count):
        shape = source.randrange(16), source.randrange(512), source.randrange(20_000)
        steps.append(MeasuredStep(*shape, TRUE.step_s(*shape) * (1 + source.uniform(-noise, noise))))
    return steps


def test_exact_steps_give_the_true_coefficients() -> None:
    found = fit(measured(0.0), "test")
    assert (found.base_s, found.decode_s, found.prefill_s, found.context_s) == pytest.approx(
        (TRUE.base_s, TRUE.decode_s, TRUE.prefill_s, TRUE.context_s), rel=1e-6
    )
    assert found.relative_error == pytest.approx(0.0, abs=1e-9)


def test_prompts_that_attend_to_more_take_longer() -> None:
    true = StepTime(base_s=0.02, decode_s=0.0, prefill_s=0.003, prefill_step_s=0.005, attention_s=2e-6)
    source = random.Random(5)
    steps = []
    for _ in range(40):
        start, size = source.randrange(1000), source.choice((0, 16, 100, 512))
        took_s = true.step_s(0, size, 0, attended(start, size))
        steps.append(MeasuredStep(0, size, 0, took_s, attended(start, size)))
    found = fit(steps, "test")
    assert (found.prefill_step_s, found.attention_s) == pytest.approx((0.005, 2e-6), rel=1e-6)
    assert found.predicted_s(steps[0]) == pytest.approx(steps[0].step_s)
    assert attended(10, 3) == 11 + 12 + 13


def test_noise_shows_as_error() -> None:
    found = fit(measured(0.2), "test")
    assert found.relative_error is not None
    assert 0.03 < found.relative_error < 0.2


def test_no_cost_is_negative() -> None:
    """Decodes that seem to make steps shorter cost nothing."""
    steps = [MeasuredStep(n, p, 0, 0.01 + 0.0001 * p - 0.0005 * n) for n in range(4) for p in (100, 200, 400)]
    assert min(fit(steps, "test").decode_s, fit(steps, "test").base_s) >= 0.0


@pytest.mark.parametrize(
    "steps",
    [
        measured(0.0, 7),
        [MeasuredStep(1, 1, 1, 0.1)] * 9,
        [*measured(0.0)[:8], MeasuredStep(1, 2, 3, 0.0)],
    ],
)
def test_what_cannot_be_fitted_is_refused(steps: list[MeasuredStep]) -> None:
    with pytest.raises(ProfileError):
        fit(steps, "test")


def test_files_are_refused_by_place(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(
        '{"num_decodes": 1, "num_prefill_tokens": 0, "num_context_tokens": 5, "step_s": 0.1}\n\n{}\n'
    )
    with pytest.raises(ProfileError, match=r"steps\.jsonl:3"):
        read_steps(path)
    profile = tmp_path / "profile.yaml"
    profile.write_text("name: x\nkv_tokens: many\n")
    with pytest.raises(ProfileError, match=r"profile\.yaml.*"):
        read_profile(profile)
    with pytest.raises(ProfileError, match=r"missing\.jsonl"):
        read_steps(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_profiles_can_be_read_and_say_where_they_come_from(path: Path) -> None:
    profile = read_profile(path)
    assert profile.name == path.stem
    assert profile.step_time.source
    assert profile.max_tokens_per_step >= profile.max_running
