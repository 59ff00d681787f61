"""How a checkpoint would lie on several GPUs under tensor parallelism, without loading it.

Every rank holds a share of the matrices that can be cut (by attention head, by neuron, by vocabulary row) and
a whole copy of the rest. Weights count as the engine holds them: as stored, but fp8 as bfloat16, and MLA's
``kv_b_proj`` twice (absorbed and expanded). A latent KV cache belongs to all heads at once, so every rank
needs all of it; a cache of separate heads is cut like them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backend.model.config import ModelConfig, parse_config
from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.headers import CONFIG, TensorHeader, read_headers, read_object
from backend.model.tensor_names import plain_name

_KV_BYTES_PER_ELEMENT = 2

_MIB = 2**20
_DEVICES = {
    "A100-40GB": 40_960 * _MIB,
    "A100": 81_920 * _MIB,
    "L40S": 46_068 * _MIB,
    "H100": 81_559 * _MIB,
    "H100-NVL": 95_830 * _MIB,
    "H200": 143_771 * _MIB,
    "B200": 183_359 * _MIB,
}
"""Memory that the driver reports."""

_GPUS = re.compile(r"(?:(?P<count>[1-9]\d{0,3})x)?(?:(?P<size>\d+(?:\.\d+)?)(?P<unit>GB|GiB)|(?P<name>.+))")

_CUT = re.compile(
    r"(?:model\.embed_tokens|lm_head|model\.layers\.\d+\.(?:self_attn\.(?:q|k|v|q_b|kv_b|o)_proj"
    r"|mlp\.(?:shared_experts\.|experts\.\d+\.)?(?:gate|up|down)_proj))\.weight"
)
_SUFFIX = re.compile(r"_(?:packed|scale|scale_inv|min|shape)$")


@dataclass(frozen=True, slots=True)
class Gpus:
    """``count`` devices of ``memory_bytes`` each."""

    count: int
    memory_bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one rank, and what its KV cache may hold.

    ``cut_bytes`` is a rank's share of what is cut, ``copied_bytes`` what every rank has whole;
    ``vision_bytes`` of the latter is the vision tower with its projector.
    """

    gpus: Gpus
    stored_bytes: int
    cut_bytes: int
    copied_bytes: int
    vision_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: int
    is_kv_copied: bool
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        """Room for the KV cache on each rank; below zero when the weights alone do not fit."""
        return self.gpus.memory_bytes - self.cut_bytes - self.copied_bytes - self.reserve_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that are resident at once in the whole group."""
        return max(self.kv_bytes, 0) // self.kv_bytes_per_token


def parse_gpus(text: str) -> Gpus:
    """Read ``8xH200``, ``H100`` or ``4x48GB``.

    Raises:
        ValueError: saying what is understood.
    """
    match = _GPUS.fullmatch(text)
    count = int(match["count"] or 1) if match else 0
    if match and match["size"]:
        unit = 2**30 if match["unit"] == "GiB" else 10**9
        memory_bytes = int(float(match["size"]) * unit)
        if memory_bytes:
            return Gpus(count, memory_bytes, f"{match['size']} {match['unit']}")
    elif match and match["name"].upper() in _DEVICES:
        name = match["name"].upper()
        return Gpus(count, _DEVICES[name], name)
    raise ValueError(f"{text!r}: write it as in 8xH200 or 4x48GB; known are {', '.join(_DEVICES)}")


def plan_memory(
    directory: Path,
    gpus: Gpus,
    *,
    reserve_bytes: int,
    max_model_len: int | None = None,
    text_only: bool = False,
) -> MemoryPlan:
    """Plan a checkpoint directory on ``gpus``; reads ``config.json`` and the heads of the files.

    Args:
        directory: the checkpoint.
        gpus: one rank each.
        reserve_bytes: memory of each rank that is neither weights nor cache.
        max_model_len: positions that one sequence must be able to have; None for the model's own limit.
        text_only: leave out the vision tower.

    Raises:
        ModelLoadError: when a file cannot be used, the model cannot be cut into so many parts, or weights and
            one sequence of ``max_model_len`` do not fit; with the numbers.
    """
    config = parse_config(read_object(directory / CONFIG), str(directory / CONFIG))
    _check_cut(config, gpus.count, str(directory / CONFIG))
    headers = read_headers(directory)
    cut = copied = vision = 0
    for name, num_bytes in _held(headers):
        if name.startswith(("vision_tower.", "mm_projector.")):
            vision += 0 if text_only else num_bytes
        elif _CUT.fullmatch(name):
            cut += num_bytes
        else:
            copied += num_bytes
    is_copied = config.mla is not None
    row_bytes = config.num_layers * config.kv_row_width * _KV_BYTES_PER_ELEMENT
    plan = MemoryPlan(
        gpus=gpus,
        stored_bytes=sum(header.num_bytes for header in headers.values()),
        cut_bytes=-(-cut // gpus.count),
        copied_bytes=copied + vision,
        vision_bytes=vision,
        reserve_bytes=reserve_bytes,
        kv_bytes_per_token=row_bytes if is_copied else row_bytes // gpus.count,
        is_kv_copied=is_copied,
        max_model_len=min(max_model_len or config.max_position_embeddings, config.max_position_embeddings),
    )
    _check_fit(plan, directory)
    return plan


def _held(headers: dict[str, TensorHeader]) -> Iterator[tuple[str, int]]:
    """Each weight's part as (name of the weight, bytes that the engine holds for it)."""
    for stored, header in headers.items():
        name = _SUFFIX.sub("", plain_name(stored))
        if stored.endswith(("_shape", "_scale_inv")):
            continue
        num_bytes = 2 * header.num_elements if header.dtype == "F8_E4M3" else header.num_bytes
        yield name, num_bytes * 2 if name.endswith(".kv_b_proj.weight") else num_bytes


def _check_cut(config: ModelConfig, num_ranks: int, source: str) -> None:
    """Refuse what cannot be cut evenly."""
    widths = {
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
    }
    if config.mla is None:
        widths["num_key_value_heads"] = config.num_kv_heads
    if config.moe is not None:
        widths["moe_intermediate_size"] = config.moe.expert_dim
    for field, width in widths.items():
        if width % num_ranks:
            raise UnsupportedModelError(f"{source}: {field}: {width} cannot be cut into {num_ranks} parts")
    if config.quant is not None and config.quant.method != "fp8" and num_ranks > 1:
        field, group = "moe_intermediate_size" if config.moe else "intermediate_size", config.quant.group_size
        if widths[field] % (num_ranks * group):
            raise UnsupportedModelError(
                f"{source}: {field}: {widths[field]} cannot be cut into {num_ranks} parts of whole groups of"
                f" {group}"
            )


def _check_fit(plan: MemoryPlan, directory: Path) -> None:
    weights, memory = plan.cut_bytes + plan.copied_bytes, plan.gpus.memory_bytes
    where = f"each of {plan.gpus.count} x {plan.gpus.name} has {_gib(memory)}"
    if plan.kv_bytes <= 0:
        raise ModelLoadError(
            f"{directory}: does not fit: {where}, weights take {_gib(weights)} of it and"
            f" {_gib(plan.reserve_bytes)} are reserved, {_gib(-plan.kv_bytes)} too much"
        )
    if plan.kv_tokens < plan.max_model_len:
        needed = plan.max_model_len * plan.kv_bytes_per_token
        raise ModelLoadError(
            f"{directory}: does not fit: {where}, of which weights and reserve leave {_gib(plan.kv_bytes)}"
            f" for the KV cache ({plan.kv_tokens:,} tokens), one sequence of {plan.max_model_len:,} tokens"
            f" needs {_gib(needed)}: take more memory or a smaller max_model_len"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
