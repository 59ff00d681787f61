"""``python -m kernels.compile_ahead``: every kernel for sm_90 at the real shapes, without a GPU.

The launching functions run on tensors without memory and the launches they make are compiled as Triton's own
run-time would: pointers and whole numbers that 16 divides are marked so, whole numbers that are 1 are
constants. Registers, spills and shared memory come from the compiled code.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.launching import Launch, Recorder, is_interpreted
from kernels.trial import Trial

CAPABILITY = 90
MAX_SHARED_BYTES = 227 * 1024
"""Of one program on an H100 or H200."""
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one trial and what it takes; ``problem`` is empty when it fits the card."""

    op: str
    name: str
    kernel: str
    num_programs: int
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    uses_tensor_cores: str
    seconds: float
    problem: str


def record(trial: Trial, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The launches of a trial at its real shape; nothing is computed."""
    recorder = Recorder()
    trial.prepare(trial.setting("meta", dtype)).run(recorder)
    return recorder.launches


def compile_trial(trial: Trial, done: set[tuple[object, ...]]) -> Iterator[Compiled]:
    """Compile the kernels of a trial, but those that ``done`` holds already; they are added to it."""
    for launch in record(trial):
        source = _describe(launch)
        key = (launch.kernel.__name__, launch.num_warps, launch.num_stages, *source.key)
        if key not in done:
            done.add(key)
            yield _compile(trial, launch, source)


@dataclass(frozen=True, slots=True)
class _Source:
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[object]]]

    @property
    def key(self) -> tuple[object, ...]:
        return (repr(self.signature), repr(self.constants), repr(sorted(self.attributes)))


def _describe(launch: Launch) -> _Source:
    """The types, constants and hints that Triton's run-time would find in the arguments of ``launch``."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            # Storage of torch is aligned; a slice may begin anywhere.
            is_aligned = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            is_aligned = value % 16 == 0
        else:
            signature[parameter.name] = "fp32"
            is_aligned = False
        if is_aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return _Source(signature, constants, attributes)


def _compile(trial: Trial, launch: Launch, source: _Source) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    begin = time.perf_counter()
    compiled = triton.compile(
        ASTSource(launch.kernel, source.signature, source.constants, source.attributes),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    registers, stack = _usage(compiled.asm["cubin"])
    shared = int(compiled.metadata.shared)
    ptx = compiled.asm["ptx"]
    cores = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else ""
    problem = ""
    if shared > MAX_SHARED_BYTES:
        problem = f"takes {shared} bytes of shared memory, more than {MAX_SHARED_BYTES}"
    elif registers * launch.num_warps * 32 > 65536:
        problem = f"takes {registers} registers in {launch.num_warps} warps, more than there are"
    return Compiled(
        trial.op, trial.name, launch.kernel.__name__, launch.num_programs, launch.num_warps,
        launch.num_stages, registers, stack, shared, cores, time.perf_counter() - begin, problem,
    )  # fmt: skip


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack (where spilled registers go)."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = _USAGE.search(text)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print a line for each kernel, or a JSON array."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_ahead", description=__doc__)
    parser.add_argument("--only", default="", help="only trials whose title contains this")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    arguments = parser.parse_args(argv)
    if is_interpreted():
        sys.stderr.write("Triton's interpreter is on: nothing can be compiled\n")
        return 2
    from kernels.trials import REAL

    results: list[Compiled] = []
    done: set[tuple[object, ...]] = set()
    for trial in REAL:
        if arguments.only in trial.title:
            for result in compile_trial(trial, done):
                results.append(result)
                if not arguments.json:
                    sys.stdout.write(_line(result))
                    sys.stdout.flush()
    if arguments.json:
        json.dump([asdict(result) for result in results], sys.stdout)
    return 1 if any(result.problem for result in results) or not results else 0


def _line(result: Compiled) -> str:
    return (
        f"{result.op + ': ' + result.name:<72} {result.kernel:<24} {result.num_warps:>2} warps"
        f" {result.registers:>4} registers {result.stack_bytes:>5} B stack {result.shared_bytes:>7} B shared"
        f" {result.uses_tensor_cores:<6} {result.seconds:>5.1f} s {result.problem}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
