"""Rotary position embedding, in place, from a table of cosines and sines."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.native import NativeLibrary, address
from kernels.rope import reference


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, native: NativeLibrary | None = None
) -> None:
    """Rotate pairs of the last dimension of ``x`` **in place** (Su et al., 2021).

    Pair ``i`` is ``(x[2i], x[2i+1])`` when ``interleaved`` (DeepSeek, GGUF), else ``(x[i], x[i + dim/2])``
    (NeoX, Hugging Face's Llama): ``(a, b) -> (a cos_i - b sin_i, a sin_i + b cos_i)``.

    Args:
        x: ``[tokens, heads, dim]``; the heads of a token lie one after another (stride ``dim``), tokens may
            be further apart, so a slice of a fused projection needs no copy.
        cos, sin: ``[tokens, dim / 2]`` float32, the rows of the tokens' positions; what the table says (YaRN,
            a tiled table) is the caller's business.

    Raises:
        ValueError: when the shapes do not fit together, or the native form is given other tensors than
            float32 ones on the CPU.
    """
    tokens, heads, dim = x.shape
    if cos.shape != (tokens, dim // 2) or sin.shape != cos.shape or dim % 2:
        raise ValueError(
            f"cos and sin must be [{tokens}, {dim // 2}], not {list(cos.shape)}, {list(sin.shape)}"
        )
    if takes_triton("rope", x):
        from kernels.rope import kernel

        return kernel.rope(x, cos, sin, interleaved=interleaved)
    if native is None:
        return reference.rope(x, cos, sin, interleaved=interleaved)
    at = address("x", x, x.shape, strided_rows=True)
    native.rope(at, x.stride(0), address("cos", cos, cos.shape), address("sin", sin, cos.shape), tokens,
                heads, dim, interleaved)  # fmt: skip
    return None
