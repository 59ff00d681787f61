"""``python -m kernels.report``: the lanes that need no GPU, as a table of ops, types, lanes and resources."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.compile_ahead import MAX_SHARED_BYTES
from kernels.launching import INTERPRETER

_PAGE = """# Kernels without a GPU

Made by `make test-kernels`, which compares every Triton kernel with its reference in Triton's interpreter and
compiles it for sm_90 at the shapes of Kimi K2.5 and of a Llama of 8 billion parameters. None of this was run
on a GPU: registers and shared memory come from the compiled code, and `make gpu-check` is what checks
bfloat16 and 8-bit floats, and measures.

## Ops

"right" counts trials in the interpreter that agree with the reference. Registers are of a thread, shared
memory of a program (limit {limit:,} bytes), both the most of the op's kernels.

{ops}

## Kernels at their real shapes

{kernels}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lanes and print the page; gives 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kernels.report", description=__doc__)
    parser.add_argument("--write", type=Path, help="write the page there as well")
    arguments = parser.parse_args(argv)
    outcomes, compiled = _lane("kernels.interpret", "1"), _lane("kernels.compile_ahead", "0")
    page = _PAGE.format(
        limit=MAX_SHARED_BYTES, ops=_ops_table(outcomes, compiled), kernels=_kernels_table(compiled)
    )
    if arguments.write:
        arguments.write.write_text(page, encoding="utf-8")
    sys.stdout.write(page)
    problems = [item for item in (*outcomes, *compiled) if item["problem"]]
    for item in problems:
        sys.stderr.write(f"{item['op']}: {item['name']}: {item['problem']}\n")
    return 1 if problems else 0


def _lane(module: str, interpreted: str) -> list[dict[str, Any]]:
    finished = subprocess.run(
        [sys.executable, "-m", module, "--json"],
        env={**os.environ, INTERPRETER: interpreted},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    results: list[dict[str, Any]] = json.loads(finished.stdout)
    return results


def _ops_table(outcomes: list[dict[str, Any]], compiled: list[dict[str, Any]]) -> str:
    lines = [
        "| op | interpreter, float32 | interpreter, float16 | sm_90, bfloat16 | registers | shared memory |",
        "|---|---|---|---|---|---|",
    ]
    for op in dict.fromkeys(item["op"] for item in outcomes):
        cells = [_count([item for item in outcomes if item["op"] == op and item["dtype"] == dtype])
                 for dtype in ("float32", "float16")]  # fmt: skip
        built = [item for item in compiled if item["op"] == op]
        fits = sum(not item["problem"] for item in built)
        registers = max(item["registers"] for item in built)
        shared = max(item["shared_bytes"] for item in built)
        lines.append(
            f"| `{op}` | {' | '.join(cells)} | {fits} of {len(built)} compiled | {registers} | {shared:,} |"
        )
    return "\n".join(lines)


def _count(outcomes: list[dict[str, Any]]) -> str:
    right = sum(not item["problem"] for item in outcomes)
    return f"{right} of {len(outcomes)} right" if outcomes else "-"


def _kernels_table(compiled: list[dict[str, Any]]) -> str:
    lines = [
        "| trial | kernel | programs | warps | stages | registers | stack | shared memory | tensor cores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {item['op']}: {item['name']} | `{item['kernel']}` | {item['num_programs']:,} "
        f"| {item['num_warps']} | {item['num_stages']} | {item['registers']} "
        f"| {item['stack_bytes']} | {item['shared_bytes']:,} | {item['uses_tensor_cores']} |"
        for item in compiled
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
