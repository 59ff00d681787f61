"""How a Triton kernel is started: now, or only noted down for a compile ahead of time.

Every launching function takes a :class:`Launcher`. :func:`launch_now` starts the kernel (on a GPU, or in
Triton's interpreter); a :class:`Recorder` keeps what would have been started, so that the very launches of
real shapes, made with tensors that have no memory (device ``meta``), are compiled on a machine without a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

INTERPRETER = "TRITON_INTERPRET"
"""Triton's own switch, read when a kernel's module is imported."""


class Launcher(Protocol):
    """Starts one kernel over a grid. ``arguments`` are the kernel's, by name, compile-time ones too."""

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *, num_warps: int = 4, num_stages: int = 2, **arguments: Any
    ) -> None: ...


def launch_now(
    kernel: Any, grid: tuple[int, ...], *, num_warps: int = 4, num_stages: int = 2, **arguments: Any
) -> None:
    """Start a kernel; an empty grid starts nothing."""
    if 0 not in grid:
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python; products then widen their operands to float32 first."""
    return os.environ.get(INTERPRETER) == "1"


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a kernel that was noted down."""

    kernel: Any
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    arguments: dict[str, Any]

    @property
    def num_programs(self) -> int:
        product = 1
        for extent in self.grid:
            product *= extent
        return product


class Recorder:
    """A launcher that starts nothing and keeps every launch, in order."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *, num_warps: int = 4, num_stages: int = 2, **arguments: Any
    ) -> None:
        self.launches.append(Launch(kernel, grid, num_warps, num_stages, arguments))
