from __future__ import annotations

import shutil
from pathlib import Path

from backend.model.fingerprint import fingerprint_of


def write_model(directory: Path, weights: bytes) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_copies_agree_and_other_weights_do_not(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a", bytes(100_000))
    copy = shutil.copytree(model, tmp_path / "copy")
    assert fingerprint_of(model) == fingerprint_of(copy)
    trained = write_model(tmp_path / "b", bytes([1]) * 100_000)
    longer = write_model(tmp_path / "c", bytes(100_001))
    ending = write_model(tmp_path / "d", bytes(99_999) + b"\1")
    prints = {fingerprint_of(each) for each in (model, trained, longer, ending)}
    (copy / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint_of(copy) not in prints
    assert len(prints) == 4


def test_a_single_file_has_one_too(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    before = fingerprint_of(file)
    file.write_bytes(b"y")
    assert fingerprint_of(file) != before
