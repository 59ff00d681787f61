"""The kimi form is DeepSeek-V3: written out in full, transformers' own code computes the same function.

Written out means: identities as matrices, latent norms replaced by nothing, a query head's rope part as wide
as the whole rope key with zeros outside its group, times the square root of the number of groups (the stock
softmax scale goes by that width), and the rotary table repeated once per group.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from backend.model.embedded import write_checkpoint
from backend.model.loader import open_model
from backend.model.quant import to_float
from backend.model.weights import WeightReader
from tests.support.tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, write_tiny_gguf

OURS_ONLY = ("embergate", "quantization_config", "architectures", "model_type")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    write_checkpoint(tmp_path / "tiny.gguf", tmp_path / "kimi", "kimi", lambda share, doing: None)
    return tmp_path / "kimi"


def test_transformers_computes_the_kimi_form_written_out(
    checkpoint: Path, load_runner: Any, sequencer: Any
) -> None:
    ids = torch.randint(4, VOCAB, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    stock = write_out(checkpoint)
    with torch.no_grad():
        expected = stock(torch.tensor([ids])).logits[0]
    logits = sequencer(load_runner(checkpoint), ids, [0, 1, 2]).compute(0, 20, 21, 39, 40)
    torch.testing.assert_close(logits, expected[[19, 20, 38, 39]], rtol=0, atol=1e-4)


def write_out(checkpoint: Path) -> DeepseekV3ForCausalLM:
    fields = json.loads((checkpoint / "config.json").read_text())
    stock_fields = {name: value for name, value in fields.items() if name not in OURS_ONLY}
    theta = stock_fields.pop("rope_theta")
    width = KV_HEADS * HEAD_DIM
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **stock_fields | {"qk_rope_head_dim": width, "head_dim": width},
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
    ).eval()
    _, source = open_model(checkpoint)
    reader = WeightReader(source)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "rotary" in name or "a_layernorm" in name:
                continue
            if parameter.dim() == 3:
                parameter.copy_(stacked_experts(reader, name, parameter.shape))
            else:
                parameter.copy_(weight(reader, name, tuple(parameter.shape)))
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm = nn.Identity()
        layer.self_attn.kv_a_layernorm = nn.Identity()
    frequencies = theta ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    model.model.rotary_emb.inv_freq = frequencies.repeat(KV_HEADS)
    return model


def weight(reader: WeightReader, name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("q_a_proj.weight"):
        return torch.eye(HIDDEN)
    if name.endswith("kv_a_proj_with_mqa.weight"):
        rope_key = to_float(reader.matrix(name, KV_HEADS * HEAD_DIM, HIDDEN))
        return torch.cat((torch.eye(HIDDEN), rope_key))
    if name.endswith("q_b_proj.weight"):
        heads = to_float(reader.matrix(name, HEADS * HEAD_DIM, HIDDEN)).view(HEADS, HEAD_DIM, HIDDEN)
        wide = torch.zeros(HEADS, KV_HEADS, HEAD_DIM, HIDDEN)
        for head in range(HEADS):
            wide[head, head * KV_HEADS // HEADS] = heads[head] * KV_HEADS**0.5
        return wide.view(-1, HIDDEN)
    if len(shape) == 1:
        return reader.vector(name, shape[0])
    return to_float(reader.matrix(name, *shape))


def stacked_experts(reader: WeightReader, name: str, shape: torch.Size) -> Tensor:
    prefix = name.rpartition(".")[0]
    count = shape[0]

    def part(expert: int, which: str) -> Tensor:
        rows, columns = (shape[1], shape[2]) if which == "down" else (shape[1] // 2, shape[2])
        return to_float(reader.matrix(f"{prefix}.{expert}.{which}_proj.weight", rows, columns))

    if name.endswith("down_proj"):
        return torch.stack([part(expert, "down") for expert in range(count)])
    return torch.stack([torch.cat((part(expert, "gate"), part(expert, "up"))) for expert in range(count)])
