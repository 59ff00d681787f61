"""How long a step takes: a linear model, fitted to measured steps, with its error.

``step_s = base_s + decode_s * decodes + context_s * context tokens``, and in a step that prefills
``+ prefill_step_s + prefill_s * prefill tokens + attention_s * attended tokens``. Context tokens are those
that the decodes of the step attend to, attended tokens those that its prompt tokens do, one by one, so that
attention within a prompt grows with its square. Launch cost, weights read once per step, per-row work and KV
reads are each linear in one of these; what that leaves out is in ``relative_error``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np


class ProfileError(ValueError):
    """A profile or a table of steps that cannot be used; the message says which and why."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients in seconds. ``relative_error`` is the median of ``|fitted - measured| / measured``; None
    for figures that were not fitted here. ``source`` says where they come from.
    """

    base_s: float
    decode_s: float
    prefill_s: float
    context_s: float = 0.0
    prefill_step_s: float = 0.0
    attention_s: float = 0.0
    source: str = ""
    relative_error: float | None = None

    def step_s(
        self, num_decodes: int, num_prefill_tokens: int, num_context_tokens: int, num_attended: float = 0.0
    ) -> float:
        """Seconds of a step; never less than a microsecond."""
        takes_s = self.base_s + self.decode_s * num_decodes + self.context_s * num_context_tokens
        if num_prefill_tokens:
            takes_s += self.prefill_step_s + self.prefill_s * num_prefill_tokens
            takes_s += self.attention_s * num_attended
        return max(1e-6, takes_s)

    def predicted_s(self, step: MeasuredStep) -> float:
        """Seconds of a step that was measured."""
        return self.step_s(
            step.num_decodes, step.num_prefill_tokens, step.num_context_tokens, step.num_attended
        )


def attended(start: int, num_tokens: int) -> float:
    """Tokens that ``num_tokens`` prompt tokens from position ``start`` on attend to, summed up over them."""
    return num_tokens * (start + (num_tokens + 1) / 2)


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a table of steps."""

    num_decodes: int
    num_prefill_tokens: int
    num_context_tokens: int
    step_s: float
    num_attended: float = 0.0


class ReplicaProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one replica is. ``kv_tokens`` fit in its KV cache; ``num_gpus`` for what it costs;
    ``kv_bytes_per_token`` for what it takes to send a prompt's KV elsewhere.
    """

    name: str
    step_time: StepTime
    kv_tokens: int
    max_running: int
    max_tokens_per_step: int
    max_mixed_step_s: float = 0.0
    num_gpus: int = 1
    kv_bytes_per_token: int = 70_272


def fit(steps: Sequence[MeasuredStep], source: str) -> StepTime:
    """The non-negative least-squares fit, each step weighted by the inverse of its time, so that short and
    long steps count alike.

    Raises:
        ProfileError: fewer than eight steps, or steps that are all alike.
    """
    if len(steps) < 8:
        raise ProfileError(f"{len(steps)} steps are too few to fit six coefficients; measure at least 8")
    features = np.array(
        [
            [
                1.0,
                step.num_decodes,
                step.num_prefill_tokens,
                step.num_context_tokens,
                step.num_prefill_tokens > 0,
                step.num_attended,
            ]
            for step in steps
        ],
        dtype=float,
    )
    times = np.array([step.step_s for step in steps])
    if times.min() <= 0:
        raise ProfileError("step_s: must be positive in every row")
    if np.ptp(features, axis=0).max() == 0:
        raise ProfileError("all steps are alike: measure decodes and prefills of several sizes")
    found = _non_negative(features / times[:, None], np.ones(len(times)))
    error = float(np.median(np.abs(features @ found - times) / times))
    return StepTime(
        base_s=float(found[0]),
        decode_s=float(found[1]),
        prefill_s=float(found[2]),
        context_s=float(found[3]),
        prefill_step_s=float(found[4]),
        attention_s=float(found[5]),
        source=source,
        relative_error=error,
    )


def _non_negative(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients: the best of all subsets of the columns (a negative
    cost would let a step get shorter by doing more).
    """
    best, best_loss = np.zeros(features.shape[1]), float(target @ target)
    for subset in range(1, 2 ** features.shape[1]):
        columns = [index for index in range(features.shape[1]) if subset >> index & 1]
        found, *_ = np.linalg.lstsq(features[:, columns], target, rcond=None)
        if (found < 0).any():
            continue
        loss = float(((features[:, columns] @ found - target) ** 2).sum())
        if loss < best_loss - 1e-12:
            best_loss = loss
            best = np.zeros(features.shape[1])
            best[columns] = found
    return best


def read_profile(path: Path) -> ReplicaProfile:
    """A profile from a YAML file.

    Raises:
        ProfileError: naming the file and the key that is wrong.
    """
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=ReplicaProfile)
    except (OSError, msgspec.DecodeError) as error:
        raise ProfileError(f"{path}: {error}") from None


def read_steps(path: Path) -> list[MeasuredStep]:
    """A table of measured steps: one JSON object a line.

    Raises:
        ProfileError: naming file and line.
    """
    steps: list[MeasuredStep] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                steps.append(msgspec.json.decode(line, type=MeasuredStep))
            except msgspec.DecodeError as error:
                raise ProfileError(f"{path}:{number}: {error}") from None
    return steps
