"""The vision tower equals an independent implementation, with weights read by their official names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25VisionModel,
)

from backend.model.checkpoint import SafetensorsCheckpoint
from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.fields import Fields
from backend.model.placement import Placement
from backend.model.vision import Grid, VisionTower
from backend.model.vision_config import VisionConfig, parse_vision_config
from backend.model.weights import WeightReader

HIDDEN, HEADS, TEXT = 96, 4, 80
RAW: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "init_pos_emb_height": 16,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 16,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": HIDDEN,
    "mm_projector_type": "patchmerger",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": TEXT,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": HIDDEN,
    "vt_intermediate_size": 160,
    "vt_num_attention_heads": HEADS,
    "vt_num_hidden_layers": 3,
}
CPU = Placement(torch.device("cpu"), torch.float32)


def parse(**changes: Any) -> VisionConfig:
    return parse_vision_config(Fields({**RAW, **changes}, "config.json", "vision_config."), TEXT)


class Reference:
    """Transformers' tower and projector with random weights, and the same weights under official names."""

    def __init__(self) -> None:
        config = Kimi_K25Config(
            text_config={"model_type": "deepseek_v3", "hidden_size": TEXT},
            vision_config={
                "hidden_size": HIDDEN,
                "num_attention_heads": HEADS,
                "num_hidden_layers": 3,
                "intermediate_size": 160,
                "pos_emb_height": 16,
                "pos_emb_width": 16,
            },
            projection_hidden_size=HIDDEN,
        )
        config.vision_config._attn_implementation = "eager"
        torch.manual_seed(11)
        self._tower = Kimi_K25VisionModel(config.vision_config).eval()
        self._projector = Kimi_K25MultimodalProjection(config).eval()
        with torch.no_grad():
            for module in (self._tower, self._projector):
                for name, weight in module.named_parameters():
                    is_scale = "norm" in name and name.endswith("weight")
                    weight.copy_(torch.randn(weight.shape) * 0.2 + (1.0 if is_scale else 0.0))

    @torch.no_grad()
    def encode(self, pixels: Tensor, grid: Grid) -> Tensor:
        normalised = (pixels.float() / 255 - 0.5) / 0.5
        shape = torch.tensor([[grid.frames, grid.rows, grid.columns]])
        merged = self._tower(normalised, grid_thw=shape).pooler_output
        return self._projector(merged).squeeze(1)

    def tensors(self) -> dict[str, Tensor]:
        tower = {name: weight.detach() for name, weight in self._tower.named_parameters()}
        projector = {name: weight.detach() for name, weight in self._projector.named_parameters()}
        official = {
            "vision_tower.patch_embed.pos_emb.weight": tower["patch_embed.pos_emb.position_embeddings"]
        }
        for part in ("weight", "bias"):
            official[f"vision_tower.patch_embed.proj.{part}"] = tower[f"patch_embed.proj.{part}"]
            official[f"vision_tower.encoder.final_layernorm.{part}"] = tower[f"final_layernorm.{part}"]
            for theirs, stored in (("pre_norm", "pre_norm"), ("in_proj", "proj.0"), ("out_proj", "proj.2")):
                official[f"mm_projector.{stored}.{part}"] = projector[f"{theirs}.{part}"]
            for block in range(3):
                theirs, stored = f"layers.{block}", f"vision_tower.encoder.blocks.{block}"
                for one, other in (("norm1", "norm0"), ("norm2", "norm1"), ("attn.proj", "wo")):
                    official[f"{stored}.{other}.{part}"] = tower[f"{theirs}.{one}.{part}"]
                for one, other in (("fc1", "fc0"), ("fc2", "fc1")):
                    official[f"{stored}.mlp.{other}.{part}"] = tower[f"{theirs}.mlp.{one}.{part}"]
                queries, keys, values = (tower[f"{theirs}.attn.{name}_proj.{part}"] for name in "qkv")
                official[f"{stored}.wqkv.{part}"] = torch.cat((pairs(queries), pairs(keys), values))
        return {name: weight.contiguous().clone() for name, weight in official.items()}


def pairs(halves: Tensor) -> Tensor:
    """Rows of each head from halves, as transformers has them, to neighbouring pairs, as stored."""
    split = halves.view(HEADS, 2, HIDDEN // HEADS // 2, -1)
    return split.transpose(1, 2).reshape(halves.shape)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def load(directory: Path, tensors: dict[str, Tensor], config: VisionConfig | None = None) -> VisionTower:
    save_file(tensors, directory / "model.safetensors")
    reader = WeightReader(SafetensorsCheckpoint(directory))
    tower = VisionTower(config or parse(), reader, CPU)
    reader.finish()
    return tower


@pytest.fixture
def tower(reference: Reference, tmp_path: Path) -> VisionTower:
    return load(tmp_path, reference.tensors())


def random_pixels(grid: Grid, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (grid.num_patches, 3, 14, 14), generator=generator, dtype=torch.uint8)


class TestParity:
    @pytest.mark.parametrize(
        "grid",
        [Grid(16, 16), Grid(4, 6), Grid(22, 10), Grid(2, 40), Grid(6, 4, frames=3), Grid(16, 16, frames=4)],
        ids=str,
    )
    def test_every_size_gives_what_the_reference_gives(
        self, tower: VisionTower, reference: Reference, grid: Grid
    ) -> None:
        pixels = random_pixels(grid)
        ours, theirs = tower.encode(pixels, grid), reference.encode(pixels, grid)
        assert ours.shape == theirs.shape == (tower.num_tokens(grid), TEXT)
        assert (ours - theirs).norm() / theirs.norm() < 1e-5
        assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-4

    def test_every_pixel_counts_and_so_does_its_place(self, tower: VisionTower) -> None:
        grid = Grid(4, 6)
        pixels = random_pixels(grid)
        changed, turned = pixels.clone(), pixels.flip(0)
        changed[-1, 2, 13, 13] ^= 128
        before = tower.encode(pixels, grid)
        assert not torch.allclose(before, tower.encode(changed, grid), rtol=0, atol=1e-6)
        assert not torch.allclose(before.flip(0), tower.encode(turned, grid), rtol=0, atol=1e-2)

    def test_half_precision_stays_near(self, reference: Reference, tmp_path: Path) -> None:
        tensors = {name: weight.bfloat16() for name, weight in reference.tensors().items()}
        save_file(tensors, tmp_path / "model.safetensors")
        placement = Placement(torch.device("cpu"), torch.bfloat16)
        tower = VisionTower(parse(), WeightReader(SafetensorsCheckpoint(tmp_path)), placement)
        grid = Grid(8, 6)
        pixels = random_pixels(grid)
        ours, theirs = tower.encode(pixels, grid), reference.encode(pixels, grid)
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs).norm() / theirs.norm() < 0.05


class TestWork:
    def test_it_can_be_ended_between_layers(self, tower: VisionTower) -> None:
        calls: list[int] = []

        def pause() -> None:
            calls.append(1)
            if len(calls) == 2:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            tower.encode(random_pixels(Grid(4, 4)), Grid(4, 4), pause)

    @pytest.mark.parametrize(
        ("shape", "grid"),
        [
            ((23, 3, 14, 14), Grid(4, 6)),
            ((24, 3, 14, 12), Grid(4, 6)),
            ((12, 3, 14, 14), Grid(3, 4)),
            ((40, 3, 14, 14), Grid(2, 4, frames=5)),
            ((0, 3, 14, 14), Grid(0, 4)),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, tower: VisionTower, shape: tuple[int, ...], grid: Grid
    ) -> None:
        with pytest.raises(ValueError, match=r"grid|pixels"):
            tower.encode(torch.zeros(shape, dtype=torch.uint8), grid)


class TestLoading:
    def test_a_missing_weight_is_named(self, reference: Reference, tmp_path: Path) -> None:
        tensors = reference.tensors()
        del tensors["vision_tower.encoder.blocks.1.mlp.fc0.bias"]
        with pytest.raises(ModelLoadError, match=r"blocks\.1\.mlp\.fc0\.bias.*missing"):
            load(tmp_path, tensors)

    def test_a_wrong_shape_is_named(self, reference: Reference, tmp_path: Path) -> None:
        config = replace(parse(), patch_size=16)
        with pytest.raises(ModelLoadError, match=r"patch_embed\.proj\.weight.*\[96, 3, 16, 16\]"):
            load(tmp_path, reference.tensors(), config)

    def test_the_official_shape_is_read(self) -> None:
        raw = {
            **RAW,
            "init_pos_emb_height": 64,
            "init_pos_emb_width": 64,
            "mm_hidden_size": 1152,
            "text_hidden_size": 7168,
            "vt_hidden_size": 1152,
            "vt_intermediate_size": 4304,
            "vt_num_attention_heads": 16,
            "vt_num_hidden_layers": 27,
        }
        config = parse_vision_config(Fields(raw, "config.json", "vision_config."), 7168)
        assert (config.head_dim, config.merged_size, config.out_size) == (72, 4608, 7168)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("merge_type", "sd2"),
            ("mm_projector_type", "mlp"),
            ("pos_emb_type", "rope"),
            ("projector_hidden_act", "relu"),
            ("merge_kernel_size", [2, 1]),
            ("mm_hidden_size", 97),
            ("text_hidden_size", 81),
            ("use_window_attention", True),
        ],
    )
    def test_what_it_does_not_do_is_refused_by_name(self, field: str, value: object) -> None:
        with pytest.raises(UnsupportedModelError, match=rf"config\.json: vision_config\.{field}: "):
            parse(**{field: value})
