"""The threads of the native library: shared by callers, and gone with their owner."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import torch

from kernels.native import NativeLibrary
from kernels.packed_linear import packed_linear
from kernels.packed_linear.cases import SMOLLM2
from tests.kernels.poison import assert_close


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_callers_at_the_same_time_do_not_disturb_each_other(library_path: Path) -> None:
    native, weight = NativeLibrary(library_path, 3), SMOLLM2[1].weight()
    inputs = [torch.randn(5, weight.in_features) for _ in range(4)]
    expected = [packed_linear(x, weight, native=native) for x in inputs]
    results: list[tuple[int, torch.Tensor]] = []

    def call(place: int) -> None:
        results.extend((place, packed_linear(inputs[place], weight, native=native)) for _ in range(50))

    callers = [threading.Thread(target=call, args=(place,)) for place in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 200
    assert all(torch.equal(result, expected[place]) for place, result in results)


def test_threads_that_fell_asleep_wake_for_the_next_op(library_path: Path) -> None:
    native, weight = NativeLibrary(library_path, 2), SMOLLM2[1].weight()
    x = torch.randn(2, weight.in_features)
    for pause_s in (0.0, 0.0005, 0.01):
        time.sleep(pause_s)
        assert_close(packed_linear(x, weight, native=native), packed_linear(x, weight))


def test_threads_end_with_their_library(library_path: Path) -> None:
    gc.collect()
    before = count_threads()
    native = NativeLibrary(library_path, 4)
    assert count_threads() == before + 3
    del native
    gc.collect()
    assert count_threads() == before
