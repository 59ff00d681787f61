"""How a checkpoint's weights are quantised, read from ``quantization_config``.

Which matrices are quantised is told by the tensors that are there, not by the lists of names in the
configuration; what is read here says that their numbers mean what this engine takes them to mean.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from backend.model.fields import Fields

QuantMethod = Literal["embergate-affine", "compressed-tensors", "fp8"]

FP8_BLOCK = 128
"""Rows and columns that share one scale in an fp8 checkpoint."""


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """``bits`` per weight; ``group_size`` columns share a scale (and as many rows, for fp8)."""

    method: QuantMethod
    group_size: int
    bits: int


def parse_quant(fields: Fields) -> QuantConfig | None:
    """The ``quantization_config`` of a ``config.json``, None when it has none.

    Raises:
        ModelLoadError: naming the field that is missing or not honoured.
    """
    if fields.raw.get("quantization_config") is None:
        return None
    quant = fields.section("quantization_config")
    method = quant.text("quant_method")
    if method == "embergate-affine":
        return _parse_affine(quant)
    if method == "compressed-tensors":
        return _parse_compressed_tensors(quant)
    if method == "fp8":
        return _parse_fp8(quant)
    known = "compressed-tensors, embergate-affine, fp8"
    raise quant.unsupported("quant_method", f"{method!r} is not supported; known are {known}")


def _parse_affine(quant: Fields) -> QuantConfig:
    group_size, bits = quant.size("group_size"), quant.size("bits")
    if group_size != 32:
        raise quant.error("group_size", f"{group_size} is not supported, only 32")
    if bits != 4:
        raise quant.error("bits", f"{bits} is not supported, only 4 (8 for the embedding and the head)")
    return QuantConfig("embergate-affine", group_size, bits)


def _parse_compressed_tensors(quant: Fields) -> QuantConfig:
    """Symmetric INT4 in groups of 32 columns, packed eight to a word; activations as they are."""
    quant.expect("format", "pack-quantized", default=None)
    quant.expect("quantization_status", "compressed", default="compressed")
    quant.expect("kv_cache_scheme", None, default=None)
    for extra in ("sparsity_config", "transform_config"):
        if quant.raw.get(extra):
            raise quant.unsupported(extra, "only an empty one is supported")
    _refuse_unknown(
        quant,
        "config_groups format global_compression_ratio ignore kv_cache_scheme quant_method"
        " quantization_status sparsity_config transform_config version",
    )
    groups = quant.section("config_groups")
    if len(groups.raw) != 1:
        raise quant.unsupported("config_groups", f"{len(groups.raw)} groups are not supported, only one")
    group = groups.section(next(iter(groups.raw)))
    group.expect("targets", ["Linear"], default=["Linear"])
    group.expect("format", "pack-quantized", default="pack-quantized")
    group.expect("input_activations", None, default=None)
    group.expect("output_activations", None, default=None)
    _refuse_unknown(group, "format input_activations output_activations targets weights")
    weights = group.section("weights")
    honoured: dict[str, object] = {
        "type": "int",
        "num_bits": 4,
        "group_size": 32,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
    }
    for field, value in honoured.items():
        weights.expect(field, value, default=None)
    for field in ("actorder", "block_structure", "zp_dtype", "scale_dtype"):
        weights.expect(field, None, default=None)
    _refuse_unknown(
        weights,
        [*honoured, "actorder", "block_structure", "zp_dtype", "scale_dtype", "observer", "observer_kwargs"],
    )
    return QuantConfig("compressed-tensors", group_size=32, bits=4)


def _parse_fp8(quant: Fields) -> QuantConfig:
    """float8_e4m3fn with one scale per block of 128 by 128; activations are not quantised here."""
    quant.expect("fmt", "e4m3", default="e4m3")
    quant.expect("activation_scheme", "dynamic", default="dynamic")
    quant.expect("weight_block_size", [FP8_BLOCK, FP8_BLOCK], default=None)
    _refuse_unknown(
        quant, "activation_scheme fmt modules_to_not_convert quant_method scale_fmt weight_block_size"
    )
    return QuantConfig("fp8", group_size=FP8_BLOCK, bits=8)


def _refuse_unknown(fields: Fields, known: str | Collection[str]) -> None:
    names = known.split() if isinstance(known, str) else known
    unknown = fields.raw.keys() - set(names)
    if unknown:
        raise fields.unsupported(min(unknown), "unknown")
