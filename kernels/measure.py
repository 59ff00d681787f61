"""``python -m kernels.measure``: every native op beside plain torch, on the shapes of ``cases.py``.

An op whose result differs from its reference gets no figure. Times are the best of many calls on warm data;
weights that one pass of a model reads from memory are rotated, so that they come from memory here too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.expert_mlp import expert_mlp
from kernels.expert_mlp.cases import CASES as EXPERT_CASES
from kernels.native import NativeLibrary, load_native
from kernels.packed_linear import packed_linear
from kernels.packed_linear.cases import HEAD, SMOLLM2, LinearCase
from kernels.paged_attention import cases as attention_cases
from kernels.paged_attention import paged_attention
from kernels.paged_mla import cases as mla_cases
from kernels.paged_mla import paged_mla_decode
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul

_COLD_BYTES = 48 * 2**20
"""Copies of a weight are rotated until they fill this much: more than a core's share of the last cache."""
_BUDGET_S = 0.4
"""Time spent on one figure."""
_HEADING = f"{'op':<40} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8} {'torch us':>9} {'x':>6}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One op on one case: its native and its torch form, and how much work that is.

    ``check`` gives the native result and the reference's.
    """

    run: Callable[[], Tensor]
    run_torch: Callable[[], Tensor]
    check: Callable[[], tuple[Tensor, Tensor]]
    num_bytes: int = 0
    num_flops: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per op and case; the exit code says whether all were right."""
    parser = argparse.ArgumentParser(prog="python -m kernels.measure", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="measure only names that contain this")
    arguments = parser.parse_args(argv)
    native = load_native(arguments.threads)
    if native is None:
        sys.stderr.write("there are no native kernels to measure\n")
        return 1
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    sys.stdout.write(f"threads {arguments.threads}\n{_HEADING}\n")
    is_right = True
    for name, prepare in _catalogue(native):
        if arguments.only in name:
            is_right &= _report(name, prepare())
    return 0 if is_right else 1


def _report(name: str, measurement: Measurement) -> bool:
    actual, expected = measurement.check()
    if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
        sys.stdout.write(f"{name:<40} differs from its reference\n")
        return False
    ours, theirs = _best(measurement.run), _best(measurement.run_torch)
    bandwidth, rate = measurement.num_bytes / ours / 1e9, measurement.num_flops / ours / 1e9
    figures = f"{bandwidth:>7.1f} {rate:>8.1f} {theirs * 1e6:>9.1f} {theirs / ours:>6.2f}"
    sys.stdout.write(f"{name:<40} {ours * 1e6:>9.1f} {figures}\n")
    return True


def _best(run: Callable[[], Tensor]) -> float:
    """The shortest of the calls that fit the budget, in seconds."""
    run()
    best, until = float("inf"), time.perf_counter() + _BUDGET_S
    while (start := time.perf_counter()) < until:
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _catalogue(native: NativeLibrary) -> Iterator[tuple[str, Callable[[], Measurement]]]:
    for case, rows in itertools.product((*SMOLLM2, HEAD), (1, 8, 512)):
        if case is not HEAD or rows < 512:
            name = f"packed_linear {case.name} {case.bits}-bit x{rows}"
            yield name, partial(_linear, case, rows, native)
    for tokens in (1, 8, 512):
        yield f"expert_mlp {EXPERT_CASES[0].name} x{tokens}", partial(_experts, tokens, native)
    for attention_case in attention_cases.MEASURED:
        yield f"paged_attention {attention_case.name}", partial(_attention, attention_case, native)
    for mla_case in mla_cases.MEASURED:
        yield f"paged_mla {mla_case.name}", partial(_mla, mla_case, native)
    x, gate_up = torch.randn(512, 576), torch.randn(512, 3072)
    norm, gate = partial(rms_norm, x, None, 1e-5), partial(silu_mul, gate_up)
    yield "rms_norm 512 x 576", lambda: _plain(norm, 2 * x.nbytes, native)
    yield "silu_mul 512 x 1536", lambda: _plain(gate, gate_up.nbytes * 3 // 2, native)


def _linear(case: LinearCase, rows: int, native: NativeLibrary) -> Measurement:
    first = case.weight()
    copies = max(1, _COLD_BYTES // first.num_bytes) if rows < 64 else 1
    weights = itertools.cycle([first, *(case.weight(seed) for seed in range(1, copies))])
    dense = itertools.cycle([first.dequantize() for _ in range(max(1, copies // 6))])
    x = torch.randn(rows, case.in_features)
    return Measurement(
        lambda: packed_linear(x, next(weights), native=native),
        lambda: linear(x, next(dense)),
        lambda: (packed_linear(x, first, native=native), packed_linear(x, first)),
        first.num_bytes,
        2 * rows * case.out_features * case.in_features,
    )


def _experts(tokens: int, native: NativeLibrary) -> Measurement:
    case = EXPERT_CASES[0]
    gate_up, down = case.packed()
    dense = gate_up.dequantize(), down.dequantize()
    x = torch.randn(tokens, case.hidden)
    experts = torch.arange(case.top_k, dtype=torch.int32).repeat(tokens, 1)
    weights = torch.rand(tokens, case.top_k)
    arguments = (x, weights, experts, gate_up, down, case.num_experts)
    return Measurement(
        lambda: expert_mlp(*arguments, native=native),
        lambda: linear(silu_mul(linear(x, dense[0])), dense[1]),
        lambda: (expert_mlp(*arguments, native=native), expert_mlp(*arguments)),
        gate_up.num_bytes + down.num_bytes,
        6 * tokens * case.hidden * case.num_experts * case.width,
    )


def _attention(case: attention_cases.AttentionCase, native: NativeLibrary) -> Measurement:
    inputs = case.inputs()
    arguments = tuple(getattr(inputs, field.name) for field in fields(inputs))
    pairs = sum(count * length - count * (count - 1) // 2 for count, length in case.sequences)
    tokens = sum(length for _, length in case.sequences)
    return Measurement(
        lambda: paged_attention(*arguments, native=native),
        lambda: paged_attention(*arguments),
        lambda: (paged_attention(*arguments, native=native), paged_attention(*arguments)),
        4 * tokens * case.kv_heads * (case.dim + case.value_dim),
        2 * pairs * case.heads * (case.dim + case.value_dim),
    )


def _mla(case: mla_cases.MlaCase, native: NativeLibrary) -> Measurement:
    inputs = case.inputs()
    arguments = tuple(getattr(inputs, field.name) for field in fields(inputs))

    def run(form: NativeLibrary | None) -> Tensor:
        return paged_mla_decode(*arguments, rope_groups=case.rope_groups, native=form)

    tokens, width = sum(case.lengths), case.latent + case.part * case.rope_groups
    return Measurement(
        lambda: run(native),
        lambda: run(None),
        lambda: (run(native), run(None)),
        4 * tokens * width,
        2 * tokens * case.heads * (case.latent + case.part + case.scores_latent * case.latent),
    )


def _plain(run: Callable[..., Tensor], num_bytes: int, native: NativeLibrary) -> Measurement:
    ours = partial(run, native=native)
    return Measurement(ours, run, lambda: (ours(), run()), num_bytes)


if __name__ == "__main__":
    sys.exit(main())
