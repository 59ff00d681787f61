"""A checkpoint of any size whose files are all head: the weights are holes that take no disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.model.kimi_layout import WeightSlot, list_shards

_SIZES = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}


def write_sparse_checkpoint(directory: Path, config: Mapping[str, Any]) -> None:
    """Write ``config.json``, the index and sparse shards of the model that ``config`` describes."""
    directory.mkdir(exist_ok=True)
    quant = config["text_config"].get("quantization_config") or {"quant_method": None}
    shards = list_shards(config)
    weight_map: dict[str, str] = {}
    for number, slots in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        head: dict[str, Any] = {}
        offset = 0
        for slot in slots:
            for name, (dtype, shape) in _stored(slot, quant["quant_method"]).items():
                end = offset + math.prod(shape) * _SIZES[dtype]
                head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
                offset = end
        write_head(directory / file, head, offset)
        weight_map |= dict.fromkeys(head, file)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_head(path: Path, head: Mapping[str, Any], num_bytes: int) -> None:
    encoded = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + num_bytes)


def _stored(slot: WeightSlot, method: str | None) -> dict[str, tuple[str, list[int]]]:
    shape = list(slot.shape)
    if slot.role == "bias":
        return {slot.name: ("F32", shape)}
    if method == "compressed-tensors" and slot.role == "expert":
        rows, columns = shape
        return {
            f"{slot.name}_packed": ("I32", [rows, columns // 8]),
            f"{slot.name}_scale": ("BF16", [rows, columns // 32]),
            f"{slot.name}_shape": ("I32", [2]),
        }
    if method == "fp8" and slot.role in ("expert", "linear"):
        blocks = [-(-length // 128) for length in shape]
        return {slot.name: ("F8_E4M3", shape), f"{slot.name}_scale_inv": ("F32", blocks)}
    return {slot.name: ("BF16", shape)}
