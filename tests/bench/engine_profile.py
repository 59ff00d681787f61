"""Where the time of a step goes: every kernel that the model calls, timed at its call."""

from __future__ import annotations

import pkgutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any
from unittest import mock

import backend.model


class KernelTimes:
    """Seconds and calls by kernel."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - start
            self.calls[name] += 1
            return result

        return call

    def lines(self, total_s: float, num_steps: int) -> Iterator[str]:
        """A table row per kernel, largest first; what is left is torch's own operators and Python."""
        rows = sorted(self.seconds.items(), key=lambda item: -item[1])
        rows.append(("torch and Python", total_s - sum(self.seconds.values())))
        for name, seconds in rows:
            calls = self.calls.get(name, 0) / num_steps
            milliseconds = f"{seconds / num_steps * 1e3:9.2f} ms"
            yield f"    {name:20} {milliseconds}  {seconds / total_s:6.1%}  {calls:6.0f} calls"


@contextmanager
def timed_kernels() -> Iterator[KernelTimes]:
    """Time the kernels that :mod:`backend.model` calls, for the duration of the context."""
    times = KernelTimes()
    patches = []
    for info in pkgutil.iter_modules(backend.model.__path__, "backend.model."):
        module = import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__.startswith("kernels."):
                patches.append(mock.patch.object(module, name, times.timed(value)))
    for patch in patches:
        patch.start()
    try:
        yield times
    finally:
        for patch in patches:
            patch.stop()
