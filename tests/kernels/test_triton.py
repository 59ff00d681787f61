"""Triton kernels without a GPU: in Triton's interpreter against their references, and compiled for sm_90.

Both need processes of their own, because Triton reads the interpreter's switch when a kernel is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

from kernels.compile_ahead import MAX_SHARED_BYTES, record
from kernels.trials import REAL, SMALL

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

Results = dict[tuple[str, ...], dict[str, object]]


def run_lane(
    module: str, *arguments: str, root: Path = ROOT, interpreted: bool
) -> subprocess.CompletedProcess[str]:
    """A lane in a fresh process that prints JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if interpreted else "0"}
    return subprocess.run(
        [sys.executable, "-m", module, "--json", *arguments],
        cwd=root, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> Results:
    """Every small trial's outcome by op, name and type."""
    finished = run_lane("kernels.interpret", interpreted=True)
    assert finished.stdout, finished.stderr
    return {(item["op"], item["name"], item["dtype"]): item for item in json.loads(finished.stdout)}


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, object]]:
    """Every kernel's resources at the real shapes."""
    finished = run_lane("kernels.compile_ahead", interpreted=False)
    assert finished.stdout, finished.stderr
    results: list[dict[str, object]] = json.loads(finished.stdout)
    return results


@pytest.mark.parametrize("trial", SMALL, ids=lambda trial: trial.title)
def test_a_kernel_equals_its_reference(trial: object, interpreted: Results) -> None:
    for dtype in trial.types:  # type: ignore[attr-defined]
        outcome = interpreted[trial.op, trial.name, str(dtype)[6:]]  # type: ignore[attr-defined]
        assert outcome["problem"] == ""


def test_the_interpreters_lane_is_short(interpreted: Results) -> None:
    assert sum(float(str(outcome["seconds"])) for outcome in interpreted.values()) < 150


def test_every_kernel_compiles_for_sm_90_and_fits(compiled: list[dict[str, object]]) -> None:
    assert [item for item in compiled if item["problem"]] == []
    for item in compiled:
        assert 0 < int(str(item["registers"])) <= 255
        assert int(str(item["shared_bytes"])) <= MAX_SHARED_BYTES
        # A few spilled bytes are no matter; a kernel that lives on its stack is.
        assert int(str(item["stack_bytes"])) <= 128


def test_every_kernel_of_the_real_shapes_was_compiled(compiled: list[dict[str, object]]) -> None:
    launched = {launch.kernel.__name__ for trial in REAL for launch in record(trial)}
    assert {item["kernel"] for item in compiled} == launched
    assert {trial.op for trial in REAL} == {trial.op for trial in SMALL}


def test_large_products_use_hoppers_tensor_cores(compiled: list[dict[str, object]]) -> None:
    cores = {item["kernel"]: item["uses_tensor_cores"] for item in compiled if "prefill" in str(item["name"])}
    for kernel in ("attend", "multiply_groups", "multiply_packed_groups", "multiply_scaled"):
        assert cores[kernel] == "wgmma"
