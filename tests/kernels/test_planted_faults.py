"""The interpreter's lane finds faults: planted into a copy of the kernels, each turns its trial red."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

from tests.kernels.test_triton import ROOT

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in a file, and the trials whose title contains ``trial`` must notice."""

    name: str
    file: str
    old: str
    new: str
    trial: str


FAULTS = (
    Fault("latents read past the context", "paged_mla/kernel.py",
          "mask=is_key[:, None] & is_latent[None, :], other=0.0", "mask=is_latent[None, :], other=0.0",
          "paged_mla: decode, cut"),
    Fault("values read past the context", "paged_attention/kernel.py",
          "mask=is_key[:, None] & is_value[None, :], other=0.0", "mask=is_value[None, :], other=0.0",
          "paged_attention: decode"),
    Fault("columns read past the row", "rms_norm/kernel.py",
          "value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)",
          "value = tl.load(x + row * x_stride + at)", "rms_norm: 3 x 13"),
    Fault("a query sees the token after it", "paged_attention/kernel.py",
          "position[None, :] <= last[:, None]", "position[None, :] <= last[:, None] + 1",
          "paged_attention: mixed"),
    Fault("scores without their scale", "paged_mla/kernel.py", "scores * scale", "scores",
          "paged_mla: decode"),
    Fault("a part's weight is forgotten", "paged_attention/kernel.py",
          "share = tl.exp2(log - tl.max(log, 0))", "share = tl.exp2(log * 0)", "paged_mla: decode, cut"),
    Fault("the scale of the neighbouring group", "int4_gemm/kernel.py",
          "scales_at + begin // GROUP,", "scales_at + begin // GROUP + 1,", "int4_gemm: 22"),
    Fault("nibbles in two's complement", "int4_gemm/kernel.py", "& 0xF) - 8", "& 0xF ^ 8) - 8",
          "int4_gemm: 22"),
    Fault("the scale of the first rows for all", "fp8_gemm/kernel.py",
          "column // GROUP * groups", "column * 0", "fp8_gemm: 19"),
    Fault("a latent's offset in 32 bits", "paged_mla/kernel.py",
          "(block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * width",
          "(block * BLOCK_SIZE + position % BLOCK_SIZE) * width", "paged_mla: far"),
    Fault("a slot in 32 bits", "store_kv/kernel.py", "slot = tl.load(slots + token)",
          "slot = tl.load(slots + token).to(tl.int32)\n    head = head.to(tl.int32)", "paged_attention: far"),
    Fault("a row's offset in 32 bits", "grouped_gemm/kernel.py",
          "x_at = x + row.to(tl.int64)[:, None]", "x_at = x + row[:, None]", "grouped_gemm: rows far"),
    Fault("the neighbour's weights", "grouped_gemm/kernel.py",
          "weight + expert.to(tl.int64)", "weight + (EXPERTS - 1 - expert).to(tl.int64)", "grouped_gemm: 22"),
    Fault("two experts of a token swapped", "moe_permute/kernel.py",
          "weight = tl.load(weights + token * TOP_K + choice)",
          "weight = tl.load(weights + token * TOP_K + TOP_K - 1 - choice)", "moe_permute: unpermute"),
    Fault("ties go to the last expert", "moe_gate/kernel.py",
          "at = tl.min(tl.min(tl.where(free & (choice == highest), expert, EXPERTS), 1), 0)",
          "at = tl.max(tl.max(tl.where(free & (choice == highest), expert, -1), 1), 0)", "moe_gate: no bias"),
    Fault("a row that is not written", "rope/kernel.py",
          "tl.store(place + gap, (first", "tl.store(place, (first", "rope: halves"),
    Fault("the mask's bits from the wrong end", "sample/kernel.py", "(at % 32)", "(31 - at % 32)",
          "sample: 5"),
    Fault("a program leaves its tile unwritten", "silu_mul/kernel.py",
          "mask=inside)\n\n\ndef", "mask=inside & (row > 0))\n\n\ndef", "silu_mul: 2"),
)  # fmt: skip


Ending = tuple[int, str]
"""A lane's exit code, and what it printed."""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    """How the lane ends with each fault, by the fault's name."""
    home = tmp_path_factory.mktemp("faults")
    lanes = [(str(plant(fault, home / str(number))), fault.trial) for number, fault in enumerate(FAULTS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.support.fault_lane"], input=json.dumps(lanes),
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    names = [fault.name for fault in FAULTS]
    return dict(zip(names, map(tuple, json.loads(finished.stdout)), strict=True))


def plant(fault: Fault, home: Path) -> Path:
    """A copy of the kernels with the fault in it."""
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    file = home / "kernels" / fault.file
    source = file.read_text()
    assert source.count(fault.old) >= 1, f"the place of {fault.name!r} has moved: plant it anew"
    file.write_text(source.replace(fault.old, fault.new))
    return home


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, endings: dict[str, Ending]) -> None:
    returncode, printed = endings[fault.name]
    # Above 1, or below 0: a read so far out that the process did not survive it.
    assert returncode != 0, "the lane is green with the fault in it"
    if returncode == 1:
        problems = [item["problem"] for item in json.loads(printed) if item["problem"]]
        assert problems
        assert not any("CompilationError" in problem or "NameError" in problem for problem in problems)
