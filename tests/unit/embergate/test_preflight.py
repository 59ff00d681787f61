"""What would make a start fail is said in one sentence, with the fix, before anything starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from embergate import disk
from embergate.config_file import decode_config
from embergate.preflight import check_data_dir, check_port, warn_of_slowness
from embergate.refusal import Refusal
from embergate.voice import Voice
from tests.support.ports import free_port


def test_a_taken_port_is_named_with_its_owner_and_its_key() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(Refusal) as refused:
            check_port("127.0.0.1", port, "gateway.port")
    message = str(refused.value)
    assert f"port {port} is taken by " in message
    assert f"(process {os.getpid()})" in message
    assert "set gateway.port in config.yaml to a free one" in message


def test_a_missing_compiler_is_said_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    voice = Voice(say=said.append, progress=lambda share, what: None)
    config = decode_config(b"models: [{id: m}]")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    warn_of_slowness(config, voice)
    assert "Install gcc or clang" in said[0]
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    warn_of_slowness(config, voice)
    assert len(said) == 1


def test_a_free_port_passes() -> None:
    check_port("127.0.0.1", free_port(), "gateway.port")


def test_an_unknown_host_is_named_with_its_key() -> None:
    with pytest.raises(Refusal, match=r"the host no\.such\.invalid is unknown: change gateway\.host"):
        check_port("no.such.invalid", 1, "gateway.port")


def test_a_data_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    check_data_dir(tmp_path / "a" / "data")
    assert (tmp_path / "a" / "data").stat().st_mode & 0o777 == 0o700


def test_a_data_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match=r"cannot be made .* set data_dir in config\.yaml"):
        check_data_dir(tmp_path / "file" / "data")


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: disk.shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(Refusal, match=r"Embergate needs 64\.0 MiB free .* make room"):
        check_data_dir(tmp_path)
