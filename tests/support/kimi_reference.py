"""A Kimi checkpoint as an independent implementation sees it.

The shards are read and dequantised here by the formats' definitions, number by number and with nothing of the
engine's code, and become the weights of transformers' own DeepSeek-V3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

PREFIX = "language_model."


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Every weight of a checkpoint in float32 under its own name."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    stored: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        stored |= load_file(directory / file)
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_packed"):
            base = name.removesuffix("_packed")
            weights[base] = int4(tensor, stored[f"{base}_scale"], stored[f"{base}_shape"].tolist())
        elif f"{name}_scale_inv" in stored:
            weights[name] = fp8(tensor, stored[f"{name}_scale_inv"])
        elif not name.endswith(("_scale", "_shape", "_scale_inv")):
            weights[name] = tensor.float()
    return weights


def int4(words: Tensor, scale: Tensor, shape: list[int]) -> Tensor:
    """Nibble i of word w is column 8 w + i and holds q + 8."""
    rows, columns = shape
    unsigned = words.numpy().view(np.uint32)
    numbers = np.empty((rows, columns), dtype=np.float32)
    for column in range(columns):
        numbers[:, column] = (unsigned[:, column // 8] >> np.uint32(4 * (column % 8)) & 15).astype(int) - 8
    return torch.from_numpy(numbers) * scale.float().repeat_interleave(32, dim=1)


def fp8(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """Every block of 128 by 128 has its factor."""
    rows, columns = weight.shape
    factors = scale_inv.repeat_interleave(128, dim=0)[:rows].repeat_interleave(128, dim=1)[:, :columns]
    return weight.float() * factors


def build_reference(directory: Path) -> DeepseekV3ForCausalLM:
    """transformers' DeepSeek-V3 in float32 with the checkpoint's dequantised weights."""
    fields: dict[str, Any] = json.loads((directory / "config.json").read_text())["text_config"]
    dropped = ("quantization_config", "model_type", "architectures", "dtype", "rope_theta", "rope_scaling")
    kept = {name: value for name, value in fields.items() if name not in dropped}
    rope = {"rope_theta": fields["rope_theta"], **fields["rope_scaling"]}
    rope["rope_type"] = rope.pop("type")
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**kept, rope_parameters=rope)).eval()
    weights = read_weights(directory)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "rotary" in name:
                continue
            is_stacked = parameter.dim() == 3
            value = _stacked(weights, name, len(parameter)) if is_stacked else weights[PREFIX + name]
            assert value.shape == parameter.shape, name
            parameter.copy_(value)
    return model


def _stacked(weights: dict[str, Tensor], name: str, count: int) -> Tensor:
    prefix, part = name.rsplit(".", 1)
    names = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
    experts = [
        torch.cat([weights[f"{PREFIX}{prefix}.{expert}.{each}.weight"] for each in names])
        for expert in range(count)
    ]
    return torch.stack(experts)
