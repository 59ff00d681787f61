"""guidellm: sends the requests of a Mooncake trace, so many at a time, and keeps the answers' ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.exchange import Endpoint
from loadtest.judges import hub_cache
from loadtest.judges.counted import Counted, JudgeError
from loadtest.judges.trace import write_whole
from loadtest.replay.trace import TraceEntry

_STREAMS = 2
_ID_PREFIX = "chatcmpl-"


class Guidellm:
    """Knows the judge's command line and the report that it leaves in ``folder``. All its requests are one
    session's, as it has no header for each conversation.
    """

    name = "guidellm"

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run

    def command(
        self, program: Path, endpoint: Endpoint, entries: Sequence[TraceEntry], block: int
    ) -> list[str]:
        """What to run for these requests."""
        trace = self._folder / "trace.jsonl"
        write_whole(entries, trace)
        backend = {
            "kind": "openai_http",
            "target": endpoint.api,
            "model": endpoint.model,
            "api_key": endpoint.token,
            "validate_backend": False,
            "extras": {"headers": {"x-session-affinity": self._run}, "body": {"temperature": 0}},
        }
        data = {
            "kind": "mooncake",
            "hash_id_block_size": block,
            "source": {"kind": "json_file", "path": str(trace)},
        }
        return [
            str(program), "run",
            "--backend", json.dumps(backend),
            "--data", json.dumps(data),
            "--tokenizer", f"kind=hf_auto,model={hub_cache.NAME}",
            "--profile", f"kind=concurrent,streams={_STREAMS}",
            "--output", f"kind=json,path={self._report}",
            "--disable-console-interactive",
        ]  # fmt: skip

    def counted(self) -> list[Counted]:
        """The requests of the report, one by one.

        Raises:
            JudgeError: there is no report, or a request failed or was not ended.
        """
        if not self._report.is_file():
            raise JudgeError("guidellm left no report")
        (benchmark,) = json.loads(self._report.read_bytes())["benchmarks"]
        requests = benchmark["requests"]
        for state in ("errored", "incomplete"):
            if requests[state]:
                raise JudgeError(f"{len(requests[state])} requests of guidellm were {state}")
        return [self._counted(request) for request in requests["successful"]]

    @property
    def _report(self) -> Path:
        return self._folder / "report.json"

    def _counted(self, request: dict[str, Any]) -> Counted:
        return Counted(
            session=self._run,
            prompt_tokens=request["prompt_tokens"],
            cached_tokens=request["cached_tokens"],
            completion_tokens=request["output_tokens"],
            request_id=request["response_id"].removeprefix(_ID_PREFIX),
        )
