from __future__ import annotations

import logging
import multiprocessing
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.native import CompilerMissingError, NativeBuildError, NativeLibrary, load_native
from kernels.native import build as build_module
from kernels.native.build import build_library, default_cache_dir
from kernels.rms_norm import rms_norm


def compiler_script(directory: Path, body: str) -> Path:
    script = directory / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return script


def test_a_second_build_compiles_nothing(library_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_compile", None)
    assert build_library(library_path.parent) == library_path
    assert not list(library_path.parent.glob("build-*"))


@pytest.mark.slow
def test_processes_that_start_together_share_one_build(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = compiler_script(tmp_path, f'[ "$1" = --version ] || echo run >> {log}\nexec cc "$@"')
    os.environ["CC"] = str(script)
    try:
        with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
            paths = list(pool.map(build_library, [tmp_path / "cache"] * 3))
    finally:
        del os.environ["CC"]
    assert len(set(paths)) == 1
    assert log.read_text().count("run") == 1
    NativeLibrary(paths[0], 1)


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompilerMissingError, match="no C compiler found"):
        build_library(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_native(1, cache_dir=tmp_path) is None
    assert [record.message for record in caplog.records] == [
        "native CPU kernels are off, torch serves: no C compiler found (install gcc or clang, or set CC)"
    ]


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = compiler_script(
        tmp_path, '[ "$1" = --version ] && exit 0\necho "x.c:1: error: no such thing" >&2; exit 1'
    )
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(NativeBuildError, match=r"compiler failed: x\.c:1: error: no such thing"):
        build_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.slow
@pytest.mark.slow
def test_flags_the_compiler_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler without -march=native still gives a library."""
    refused = "-march=native) echo 'error: unknown' >&2; exit 1;;"
    body = f'for arg; do case "$arg" in {refused} esac; done\nexec cc "$@"'
    monkeypatch.setenv("CC", str(compiler_script(tmp_path, body)))
    portable = NativeLibrary(build_library(tmp_path / "cache"), 2)
    x = torch.randn(40, 576)
    torch.testing.assert_close(rms_norm(x, None, 1e-5, native=portable), rms_norm(x, None, 1e-5))


def test_the_switch_forces_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERGATE_NATIVE", "off")
    assert load_native(1) is None


def test_a_cache_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(NativeBuildError, match="writable by no other"):
        build_library(shared)


def test_a_broken_library_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match="cannot be used"):
        NativeLibrary(broken, 1)
    with pytest.raises(ValueError, match="threads must be at least 1"):
        NativeLibrary(broken, 0)


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/embergate/native")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "embergate" / "native"
