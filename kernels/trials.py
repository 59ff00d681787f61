"""All trials of all ops."""

from __future__ import annotations

from kernels import far_trials
from kernels.fp8_gemm import trials as fp8_gemm
from kernels.grouped_gemm import trials as grouped_gemm
from kernels.int4_gemm import trials as int4_gemm
from kernels.moe_gate import trials as moe_gate
from kernels.moe_permute import trials as moe_permute
from kernels.paged_attention import trials as paged_attention
from kernels.paged_mla import trials as paged_mla
from kernels.rms_norm import trials as rms_norm
from kernels.rope import trials as rope
from kernels.sample import trials as sample
from kernels.silu_mul import trials as silu_mul
from kernels.store_kv import trials as store_kv

_OPS = (rms_norm, rope, silu_mul, store_kv, paged_attention, paged_mla, moe_gate, moe_permute, grouped_gemm,
        int4_gemm, fp8_gemm, sample)  # fmt: skip
SMALL = (*(trial for op in _OPS for trial in op.SMALL), *far_trials.SMALL)
"""For Triton's interpreter: small shapes with edges."""
REAL = tuple(trial for op in _OPS for trial in op.REAL)
"""The shapes of Kimi K2.5 (and of a Llama of 8 billion parameters), for compiles and a GPU."""
