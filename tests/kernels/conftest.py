"""The native library, and outputs that show what was not written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.native import NativeLibrary
from kernels.native.build import build_library, default_cache_dir


@pytest.fixture(scope="session")
def library_path() -> Path:
    """Compiled once, in the user's own cache."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler on this machine")
    return build_library(default_cache_dir())


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def native(library_path: Path, request: pytest.FixtureRequest) -> NativeLibrary:
    return NativeLibrary(library_path, request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaN, so an output that a kernel left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
