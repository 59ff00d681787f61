from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels import measure
from kernels.native import NativeLibrary


def test_an_op_gets_its_line(
    native: NativeLibrary, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_BUDGET_S", 0.01)
    monkeypatch.setattr(measure, "load_native", lambda threads: native)
    threads = torch.get_num_threads()
    try:
        assert measure.main(["--only", "silu_mul", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "threads 1"
    assert lines[2].startswith("silu_mul 512 x 1536")


def test_no_speed_of_a_wrong_result(capsys: pytest.CaptureFixture[str]) -> None:
    run = partial(torch.ones, 1)
    wrong = measure.Measurement(run, run, lambda: (torch.ones(1), torch.zeros(1)))
    assert not measure._report("an op", wrong)
    assert "differs from its reference" in capsys.readouterr().out


def test_without_native_kernels_there_is_nothing_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERGATE_NATIVE", "off")
    assert measure.main([]) == 1
    assert "no native kernels" in capsys.readouterr().err
