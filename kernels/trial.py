"""Trials: one op at one shape, prepared for a device and a type, with its result and how much work it is.

The same trials serve three lanes: Triton's interpreter (small shapes on the CPU), compiles ahead of time
(real shapes on the device ``meta``) and a GPU (real shapes, checked and timed).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.launching import Launcher

_MARGIN = 64
_TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A trial with its tensors.

    Attributes:
        run: starts the Triton form and gives its results; it may change its inputs, as the op does.
        expect: the reference's results; it changes nothing, and is called before ``run``.
        num_bytes: that must be moved to and from memory, each once.
        num_flops: multiplications and additions.
        alternatives: other implementations to time beside it, by name.
    """

    run: Callable[[Launcher], Tensors]
    expect: Callable[[], Tensors]
    num_bytes: int = 0
    num_flops: int = 0
    alternatives: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a trial's tensors lie and of what type they are.

    Tensors of floats stand in NaN and tensors of integers in absurd numbers, so that a read past their ends
    shows; the device ``meta`` has no memory and no margins.
    """

    device: str
    dtype: torch.dtype
    rng: torch.Generator | None

    @property
    def float8(self) -> torch.dtype:
        """The type of 8-bit floats; the interpreter takes the trial's own type instead."""
        return self.dtype if self.device == "cpu" else torch.float8_e4m3fn

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers."""
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        drawn = torch.randn(shape, device=self.device, generator=self.rng, dtype=torch.float32)
        return self.place((drawn * scale).to(dtype or self.dtype))

    def uniform(self, *shape: int) -> Tensor:
        """float32 numbers in [0, 1)."""
        return self.place(torch.rand(shape, device=self.device, generator=self.rng, dtype=torch.float32))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Whole numbers from ``low`` up to but not with ``high``."""
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return self.place(
            torch.randint(low, high, shape, device=self.device, generator=self.rng, dtype=dtype)
        )

    def numbers(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype = torch.int32) -> Tensor:
        """These very numbers."""
        return self.place(torch.tensor(values, dtype=dtype, device=self.device))

    def shuffled(self, count: int) -> Tensor:
        """``0 .. count-1`` in some order, int32."""
        if self.device == "meta":
            return torch.empty(count, dtype=torch.int32, device="meta")
        return torch.randperm(count, device=self.device, generator=self.rng, dtype=torch.int32)

    def behind_nan(self, cache: Tensor) -> Tensor:
        """``cache`` behind one more block, number 0, that is NaN: what a masked table entry points to."""
        return self.place(torch.cat((torch.full_like(cache[:1], torch.nan), cache)).to(self.dtype))

    def place(self, x: Tensor) -> Tensor:
        """A contiguous copy of ``x`` amid a margin that spoils whatever reads it."""
        if self.device == "meta" or x.dtype.itemsize == 1:
            return x.contiguous()
        margin = torch.nan if x.is_floating_point() else 2**30
        buffer = torch.full((x.numel() + 2 * _MARGIN,), margin, dtype=x.dtype, device=x.device)
        buffer[_MARGIN : _MARGIN + x.numel()] = x.flatten()
        return buffer[_MARGIN : _MARGIN + x.numel()].view(x.shape)


@dataclass(frozen=True, slots=True)
class Trial:
    """One op at one shape.

    ``types`` are the types that it is run with in the interpreter; ``cached`` says that ``num_bytes`` fit the
    second-level cache, so that a share of the memory's speed would say nothing.
    """

    op: str
    name: str
    prepare: Callable[[Setting], Prepared]
    types: tuple[torch.dtype, ...] = (torch.float32, torch.float16)
    tolerance: float = 1.0

    @property
    def title(self) -> str:
        return f"{self.op}: {self.name}"

    def setting(self, device: str, dtype: torch.dtype) -> Setting:
        """A setting whose numbers are the same every time."""
        if device == "meta":
            return Setting(device, dtype, None)
        seed = zlib.crc32(f"{self.title} {dtype}".encode())
        return Setting(device, dtype, torch.Generator(device).manual_seed(seed))


def difference(actual: Tensors, expected: Tensors, tolerance: float = 1.0) -> str:
    """What is wrong with ``actual``, in words; empty when nothing is.

    Floats may differ by a tolerance of their type times the largest expected number; NaN must stand at the
    same places; integers must be equal.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    for place, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            kinds = [f"{x.dtype} {list(x.shape)}" for x in (ours, theirs)]
            return f"result {place} is {kinds[0]}, not {kinds[1]}"
        if not ours.is_floating_point():
            if not torch.equal(ours, theirs):
                return f"result {place}: {int((ours != theirs).sum())} of {ours.numel()} integers differ"
            continue
        limit = tolerance * _TOLERANCES.get(ours.dtype, 0.08)
        ours, theirs = ours.float(), theirs.float()
        if strange := int((ours.isnan() != theirs.isnan()).sum()):
            return f"result {place}: {strange} numbers are NaN or ought to be"
        error = (ours - theirs).nan_to_num().abs().max().item() if ours.numel() else 0.0
        largest = theirs.nan_to_num().abs().max().item() if theirs.numel() else 0.0
        if not error <= limit * max(largest, 1e-6):
            return f"result {place}: off by {error:.3g} where the largest is {largest:.3g}"
    return ""
