"""aiperf: replays a Mooncake trace on its own clock, conversations with a header that names the session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loadtest.exchange import Endpoint
from loadtest.judges import hub_cache
from loadtest.judges.counted import Counted, JudgeError
from loadtest.judges.trace import write_turns
from loadtest.replay.trace import TraceEntry

_REPORT = "profile_export.jsonl"


class Aiperf:
    """Knows the judge's command line and the report that it leaves in ``folder``."""

    name = "aiperf"

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run

    def command(
        self, program: Path, endpoint: Endpoint, entries: Sequence[TraceEntry], block: int
    ) -> list[str]:
        """What to run for these requests."""
        trace = self._folder / "trace.jsonl"
        write_turns(entries, trace, block, self._run)
        return [
            str(program), "profile",
            "--model", endpoint.model,
            "--url", endpoint.api,
            "--api-key", endpoint.token,
            "--endpoint-type", "chat", "--streaming", "--use-server-token-count",
            "--session-header", "x-session-affinity",
            "--tokenizer", hub_cache.NAME,
            "--custom-dataset-type", "mooncake-trace",
            "--input-file", str(trace),
            "--isl-block-size", str(block),
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
            "--workers-max", "1", "--record-processors", "1",
            "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
            "--output-artifact-dir", str(self._folder / "report"),
        ]  # fmt: skip

    def counted(self) -> list[Counted]:
        """The requests of the report, one by one.

        Raises:
            JudgeError: there is no report, or a request failed.
        """
        path = self._folder / "report" / _REPORT
        if not path.is_file():
            raise JudgeError(f"aiperf left no {_REPORT}")
        return [_counted(json.loads(line)) for line in path.read_bytes().splitlines()]


def _counted(record: dict[str, dict[str, dict[str, int]]]) -> Counted:
    if record.get("error"):
        raise JudgeError(f"a request of aiperf failed: {record['error']}")
    metrics = record["metrics"]

    def figure(name: str) -> int:
        return int(metrics[name]["value"])

    return Counted(
        session=str(record["metadata"]["x_correlation_id"]),
        prompt_tokens=figure("usage_prompt_tokens"),
        cached_tokens=figure("usage_prompt_cache_read_tokens"),
        completion_tokens=figure("usage_completion_tokens"),
    )
