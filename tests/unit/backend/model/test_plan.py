"""Plans of the real model's size, from files that are all head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend.model.errors import ModelLoadError
from backend.model.headers import read_headers
from backend.model.plan import Gpus, parse_gpus, plan_memory
from backend.model.tiny_checkpoint import Form, TinyShape, tiny_config, write_tiny_checkpoint
from tests.support.kimi_text import tiny_ranks
from tests.support.sparse_checkpoint import write_head, write_sparse_checkpoint

GB = 10**9
REAL = TinyShape(
    num_layers=61, hidden=7168, num_heads=64, q_lora_rank=1536, kv_lora_rank=512, intermediate=18432,
    num_experts=384, experts_per_token=8, expert_dim=2048,
)  # fmt: skip
VISION = {"vt_hidden_size": 1152, "mm_hidden_size": 1152, "vt_intermediate_size": 4304,
          "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27}  # fmt: skip


def real_config(form: Form) -> dict[str, Any]:
    config = tiny_config(form, REAL, 163_584)
    config["text_config"] |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config["vision_config"] |= VISION
    return config


@pytest.mark.slow
def test_the_real_model_on_eight_gpus_of_141_gb(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path, real_config("int4"))
    plan = plan_memory(tmp_path, parse_gpus("8x141GB"), reserve_bytes=6 * 2**30)
    assert plan.stored_bytes == pytest.approx(595 * GB, rel=0.01)
    assert plan.kv_bytes_per_token == 70_272
    assert plan.is_kv_copied
    assert 262_144 * plan.kv_bytes_per_token / 2**30 == pytest.approx(17.2, abs=0.05)
    assert plan.vision_bytes / 2 == pytest.approx(466e6, rel=0.05)
    weights = plan.cut_bytes + plan.copied_bytes
    assert 74 * GB < weights < 78 * GB
    assert plan.kv_bytes == plan.gpus.memory_bytes - weights - 6 * 2**30
    assert plan.kv_tokens == plan.kv_bytes // 70_272
    assert 800_000 < plan.kv_tokens < 900_000


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan") / "kimi"
    config = real_config("int4")
    config["text_config"]["num_hidden_layers"] = 3
    write_sparse_checkpoint(directory, config)
    return directory


def test_what_does_not_fit_is_refused_with_numbers(few_layers: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        plan_memory(few_layers, parse_gpus("4x11GB"), reserve_bytes=6 * 2**30)
    assert str(caught.value) == (
        f"{few_layers}: does not fit: each of 4 x 11 GB has 10.2 GiB, weights take 6.9 GiB of it and 6.0 GiB"
        " are reserved, 2.6 GiB too much"
    )
    four = parse_gpus("4x8GB")
    with pytest.raises(
        ModelLoadError, match=r"one sequence of 262,144 tokens needs 0\.8 GiB: take more memory"
    ):
        plan_memory(few_layers, four, reserve_bytes=0)
    assert plan_memory(few_layers, four, reserve_bytes=0, max_model_len=32_768).kv_tokens >= 32_768


def test_what_cannot_be_cut_is_refused(few_layers: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"config\.json: num_attention_heads: 64 cannot be cut into 3 parts"
    ):
        plan_memory(few_layers, Gpus(3, 10**15, "x"), reserve_bytes=0)
    write_sparse_checkpoint(tmp_path, tiny_config("int4", TinyShape(), 256))
    with pytest.raises(
        ModelLoadError, match=r"moe_intermediate_size: 64 cannot be cut into 4 parts of whole gro"
    ):
        plan_memory(tmp_path, Gpus(4, 10**15, "x"), reserve_bytes=0)


def test_every_byte_is_counted_once(tmp_path: Path) -> None:
    """On one GPU all is there: as stored, but for what the engine holds in another form."""
    ranks = dict(list(tiny_ranks().items())[:268])
    for form in ("bf16", "int4"):
        directory = tmp_path / form
        write_tiny_checkpoint(directory, form, ranks, shape=TinyShape(num_layers=2))  # type: ignore[arg-type]
        headers = read_headers(directory)
        twice = sum(header.num_bytes for name, header in headers.items() if "kv_b_proj" in name)
        shapes = sum(header.num_bytes for name, header in headers.items() if name.endswith("_shape"))
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        one = plan_memory(directory, parse_gpus("1x48GB"), reserve_bytes=0)
        assert one.stored_bytes == index["metadata"]["total_size"]
        assert one.cut_bytes + one.copied_bytes == one.stored_bytes + twice - shapes
        two = plan_memory(directory, parse_gpus("2x48GB"), reserve_bytes=0)
        assert two.copied_bytes == one.copied_bytes
        assert two.cut_bytes * 2 == one.cut_bytes
        assert two.kv_bytes_per_token == one.kv_bytes_per_token == 2 * 96 * 2
        text = plan_memory(directory, parse_gpus("1x48GB"), reserve_bytes=0, text_only=True)
        assert text.copied_bytes == one.copied_bytes - one.vision_bytes


def test_fp8_is_held_as_bfloat16(tmp_path: Path) -> None:
    sizes = []
    for form in ("bf16", "fp8"):
        write_sparse_checkpoint(tmp_path / form, tiny_config(form, TinyShape(), 300))  # type: ignore[arg-type]
        plan = plan_memory(tmp_path / form, parse_gpus("48GB"), reserve_bytes=0)
        sizes.append(plan.cut_bytes + plan.copied_bytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH200", Gpus(8, 143_771 * 2**20, "H200")),
        ("h100", Gpus(1, 81_559 * 2**20, "H100")),
        ("2xA100-40GB", Gpus(2, 40_960 * 2**20, "A100-40GB")),
        ("4x48GB", Gpus(4, 48 * GB, "48 GB")),
        ("1x22.5GiB", Gpus(1, 24_159_191_040, "22.5 GiB")),
    ],
)
def test_gpus_are_read(text: str, expected: Gpus) -> None:
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["", "0xH200", "8x", "8xH900", "H200x8", "-1x48GB", "2x0GB"])
def test_gpus_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as in 8xH200 or 4x48GB"):
        parse_gpus(text)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path, tiny_config("bf16", TinyShape(num_layers=1), 300))
    shard = tmp_path / "model-00001-of-000003.safetensors"
    gpus = parse_gpus("48GB")

    def complaint() -> str:
        with pytest.raises(ModelLoadError) as caught:
            plan_memory(tmp_path, gpus, reserve_bytes=0)
        return str(caught.value)

    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert complaint() == f"{shard}: {len(whole) - 1} bytes, and its head says {len(whole)}"
    shard.write_bytes(b"\xff" * 8)
    assert complaint() == f"{shard}: not a readable safetensors file"
    shard.write_bytes(b"\x08\0\0\0\0\0\0\0{nonsens")
    assert complaint().startswith(f"{shard}: not a readable safetensors file: ")
    write_head(shard, {}, 0)
    assert complaint().endswith("missing (named by model.safetensors.index.json)")
    shard.unlink()
    assert complaint() == f"{shard}: missing"
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    assert complaint().endswith("weight_map: '../x' is not a file name")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert complaint().endswith("weight_map: missing or not a mapping to file names")


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, backend.model.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
