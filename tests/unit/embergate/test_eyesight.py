"""What the gateway knows of a model's eyes before any replica has loaded it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embergate.config_file import Settings, load_settings
from embergate.eyesight import served_models


def settings_of(directory: Path, text: str) -> Settings:
    (directory / "config.yaml").write_text(text)
    return load_settings(None, {}, directory)


def seen(settings: Settings) -> dict[str, bool | None]:
    return {model.id: model.sees_images for model in served_models(settings)}


@pytest.mark.parametrize(
    ("model", "sees"),
    [
        ("{id: m}", False),
        ("{id: m, source: tiny-int4}", True),
        ("{id: m, source: tiny-int4, text_only: true}", False),
        ("{id: m, source: seeing}", True),
        ("{id: m, source: seeing, text_only: true}", False),
        ("{id: m, source: blind}", False),
        ("{id: m, source: model.gguf}", False),
        ("{id: m, source: nowhere}", None),
    ],
)
def test_a_local_checkpoint_says_whether_its_model_sees(
    tmp_path: Path, model: str, sees: bool | None
) -> None:
    for name, config in (("seeing", {"vision_config": {"patch_size": 14}}), ("blind", {"hidden_size": 8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert seen(settings_of(tmp_path, f"models: [{model}]")) == {"m": sees}


def test_of_a_model_that_is_elsewhere_only_its_replicas_know(tmp_path: Path) -> None:
    text = (
        "models: [{id: here}, {id: there}, {id: blind, text_only: true}]\n"
        "replicas: {addresses: [{id: far, url: 'http://10.0.0.7:8801'}]}"
    )
    assert seen(settings_of(tmp_path, text)) == {"here": False, "there": None, "blind": False}
    text = text.replace("{addresses", "{count: 0, addresses")
    assert seen(settings_of(tmp_path, text)) == {"here": None, "there": None, "blind": False}
