"""What a run is judged by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from simulator.histogram import Histogram
from simulator.requests import SimulatedRequest

PERCENTILES = (50, 90, 99)


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds, within half a percent (:mod:`simulator.histogram`)."""

    p50: float
    p90: float
    p99: float


class Window(msgspec.Struct, frozen=True):
    """What arrived in one stretch of time, by the end of the run."""

    start_s: float
    num_requests: int
    hit_ratio: float
    ttft_p50_s: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's run. ``imbalance`` is the largest replica's uncached prompt tokens over the mean;
    ``goodput`` the requests per second within both targets.
    """

    policy: str
    num_replicas: int
    num_requests: int
    num_refused: int
    num_retried: int
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_ratio: float
    ttft: Percentiles
    tpot: Percentiles
    imbalance: float
    goodput: float
    windows: list[Window]


class Targets(msgspec.Struct, frozen=True):
    """A request is good when both are met; seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05


class Recorder:
    """Sums up finished requests; keeps none of them, so that memory does not grow with their number."""

    def __init__(self, window_s: float, targets: Targets) -> None:
        self._window_s = window_s
        self._targets = targets
        self._ttft = Histogram()
        self._tpot = Histogram()
        self._prompt = self._cached = self._output = self._good = self._retried = 0
        self._windows: dict[int, _WindowSums] = defaultdict(_WindowSums)
        self._last_s = 0.0

    def finished(self, request: SimulatedRequest) -> None:
        """Take in an answered request."""
        assert request.first_token_s is not None
        assert request.finished_s is not None
        ttft = request.first_token_s - request.arrival_s
        rest = request.output_tokens - 1
        tpot = (request.finished_s - request.first_token_s) / rest if rest > 0 else 0.0
        self._ttft.add(ttft)
        if rest > 0:
            self._tpot.add(tpot)
        self._prompt += request.prompt_tokens
        self._cached += request.cached_tokens
        self._output += request.output_tokens
        self._retried += request.num_attempts > 1
        self._good += ttft <= self._targets.ttft_s and tpot <= self._targets.tpot_s
        self._windows[int(request.arrival_s // self._window_s)].add(request, ttft)
        self._last_s = max(self._last_s, request.finished_s)

    def results(
        self, policy: str, num_replicas: int, num_refused: int, uncached_by_replica: Mapping[str, int]
    ) -> Results:
        """The figures of all that was finished."""
        loads = list(uncached_by_replica.values()) or [0]
        mean = sum(loads) / len(loads)
        return Results(
            policy=policy,
            num_replicas=num_replicas,
            num_requests=self._ttft.num_values,
            num_refused=num_refused,
            num_retried=self._retried,
            duration_s=self._last_s,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            output_tokens=self._output,
            hit_ratio=self._cached / self._prompt if self._prompt else 0.0,
            ttft=Percentiles(*self._ttft.percentiles(PERCENTILES)),
            tpot=Percentiles(*self._tpot.percentiles(PERCENTILES)),
            imbalance=max(loads) / mean if mean else 0.0,
            goodput=self._good / self._last_s if self._last_s else 0.0,
            windows=[sums.window(index * self._window_s) for index, sums in sorted(self._windows.items())],
        )


class _WindowSums:
    __slots__ = ("cached", "prompt", "ttft")

    def __init__(self) -> None:
        self.prompt = self.cached = 0
        self.ttft = Histogram()

    def add(self, request: SimulatedRequest, ttft: float) -> None:
        self.prompt += request.prompt_tokens
        self.cached += request.cached_tokens
        self.ttft.add(ttft)

    def window(self, start_s: float) -> Window:
        (median,) = self.ttft.percentiles((50,))
        return Window(start_s, self.ttft.num_values, self.cached / self.prompt, median)
