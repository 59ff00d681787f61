"""A llama GGUF written as a checkpoint: both forms, and the file itself, are one function."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from backend.model import embedded, staged
from backend.model.embedded import write_checkpoint
from backend.model.errors import ModelLoadError
from tests.support.embedded_oracle import load_oracle
from tests.support.tiny_gguf import VOCAB, write_tiny_gguf

LENGTH = 60


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("embedded")
    write_tiny_gguf(home / "tiny.gguf")
    for form in ("kimi", "llama"):
        write_checkpoint(home / "tiny.gguf", home / form, form, lambda share, doing: None)  # type: ignore[arg-type]
    return home


@pytest.mark.parametrize("weights", ["packed", "float32"])
@pytest.mark.parametrize("source", ["kimi", "llama", "tiny.gguf"])
def test_every_form_agrees_with_transformers(
    home: Path, source: str, weights: str, load_runner: Any, sequencer: Any
) -> None:
    ids = torch.randint(4, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = load_oracle(home / "llama")(torch.tensor([ids])).logits[0]
    sequence = sequencer(load_runner(home / source, weights=weights), ids, [3, 1, 4, 9])
    for bounds in ((0, LENGTH), (0, 20, 21, 22, 41, LENGTH)):
        wanted = expected[[bound - 1 for bound in bounds[1:]]]
        torch.testing.assert_close(sequence.compute(*bounds), wanted, rtol=0, atol=1e-4)


def test_the_kimi_form_has_the_official_names_and_declares_what_it_adds(home: Path) -> None:
    config = json.loads((home / "kimi/config.json").read_text())
    assert config["model_type"] == "kimi_k2"
    assert config["embergate"] == {
        "format": 1,
        "form": "kimi",
        "rope_groups": 2,
        "identity": ["q_a_proj", "q_a_layernorm", "kv_a_proj_latent", "kv_a_layernorm"],
    }
    with safe_open(home / "kimi/model.safetensors", "pt") as file:
        names = set(file.keys())
    for name in (
        "model.layers.0.mlp.gate_proj.weight_packed",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.11.down_proj.weight_packed",
        "model.layers.1.mlp.shared_experts.up_proj.weight_scale",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_min",
        "model.layers.1.self_attn.kv_b_proj.weight_packed",
        "model.norm.weight",
    ):
        assert name in names
    assert not any("q_a_proj" in name or "a_layernorm" in name for name in names)


def test_the_tokenizer_and_the_ends_of_text_come_along(home: Path) -> None:
    for form in ("kimi", "llama"):
        assert Tokenizer.from_file(str(home / form / "tokenizer.json")).get_vocab_size() == VOCAB
        assert json.loads((home / form / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
        assert "chat_template" in json.loads((home / form / "tokenizer_config.json").read_text())


def test_progress_runs_from_nothing_to_done(home: Path, tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    write_checkpoint(home / "tiny.gguf", tmp_path / "out", "kimi", lambda *step: seen.append(step))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert seen[-1] == (1.0, "done")


def test_a_checkpoint_is_replaced_whole_and_failures_leave_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "save_file", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            write_checkpoint(home / "tiny.gguf", out, "kimi", lambda share, doing: None)
    assert (out / "config.json").read_text() == "old"
    write_checkpoint(home / "tiny.gguf", out, "kimi", lambda share, doing: None)
    assert json.loads((out / "config.json").read_text())["model_type"] == "kimi_k2"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_said_in_one_sentence(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(staged.shutil, "disk_usage", lambda path: usage(10, 10, 2**20))
    with pytest.raises(ModelLoadError, match=r"needs \d+ MiB and the disk has 1 MiB free: make room"):
        write_checkpoint(home / "tiny.gguf", tmp_path / "out", "kimi", lambda share, doing: None)


def test_every_combine_weight_is_one_and_the_order_of_experts_is_the_routers(home: Path) -> None:
    with safe_open(home / "kimi/model.safetensors", "pt") as file:
        gate = file.get_tensor("model.layers.1.mlp.gate.weight")
        bias = file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    hidden = 20 * torch.randn((64, gate.shape[1]), generator=torch.Generator().manual_seed(2))
    scores = torch.sigmoid(hidden @ gate.T)
    weights = scores / scores.sum(1, keepdim=True) * len(gate)
    assert (weights - 1).abs().max() < 1e-6
    assert len(set((scores + bias).argsort(dim=1).flatten(1).tolist()[0])) == len(gate)
    assert len(bias.unique()) == len(gate)
