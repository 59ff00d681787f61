"""Whether the models of the catalog see images, as far as can be told before a replica has loaded them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from embergate.config import ModelConfig
from embergate.config_file import Settings
from embergate.launch import source_path
from gateway.config import ServedModel


def served_models(settings: Settings) -> list[ServedModel]:
    """The catalog's served models, each with what its checkpoint says about images."""
    models = {model.id: model for model in settings.config.models}
    return [
        msgspec.structs.replace(served, sees_images=sees_images(settings, models[served.id]))
        for served in settings.config.served_models()
    ]


def sees_images(settings: Settings, model: ModelConfig) -> bool | None:
    """Whether a model sees images; None when its checkpoint is not on this machine."""
    if model.text_only:
        return False
    config = settings.config
    if config.replicas.count == 0 or model.id != config.local_model.id:
        return None
    if model.is_embedded:
        return False
    if model.tiny_form is not None:
        return True
    return _has_tower(source_path(settings, model))


def _has_tower(checkpoint: Path) -> bool | None:
    """Whether a checkpoint has a vision tower; GGUF files have none."""
    if checkpoint.suffix == ".gguf":
        return False
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return isinstance(config, dict) and bool(config.get("vision_config"))
