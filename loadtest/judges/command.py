"""``python -m loadtest judge aiperf`` and ``guidellm``"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from loadtest.exchange import Endpoint
from loadtest.judges import hub_cache
from loadtest.judges.aiperf import Aiperf
from loadtest.judges.counted import FIGURES, Counted, JudgeError, Verdict, compare
from loadtest.judges.guidellm import Guidellm
from loadtest.judges.trace import scaled
from loadtest.options import endpoint_options
from loadtest.replay.trace import MOONCAKE_BLOCK_TOKENS, TraceEntry, TraceError, read_trace, synthetic_trace
from loadtest.usage_api import billed_rows

JUDGES = {judge.name: judge for judge in (Aiperf, Guidellm)}
_KEPT_VARIABLES = ("PATH", "LANG", "TMPDIR", "OMP_NUM_THREADS")


@click.command()
@click.argument("name", type=click.Choice(list(JUDGES)))
@click.option("--program", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True,
              metavar="FILE", help="The judge, such as .venv-aiperf/bin/aiperf.")  # fmt: skip
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
              metavar="DIR", help="Of the served model: a directory with tokenizer.json.")  # fmt: skip
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="In Mooncake's format; without it one is made up.")  # fmt: skip
@click.option("--block-tokens", type=click.IntRange(min=1), default=16, show_default=True,
              help="Tokens that a block of the trace becomes.")  # fmt: skip
@click.option("--max-requests", type=click.IntRange(min=1), default=24, show_default=True)
@click.option("--max-output-tokens", type=click.IntRange(min=2), default=16, show_default=True)
@click.option("--speed", type=click.FloatRange(min=0.001), default=8.0, show_default=True)
@click.option("--timeout", "timeout_s", type=float, default=300.0, show_default=True, help="Seconds.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Keep the judge's own reports there.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="JSON too.")
@endpoint_options
@click.pass_context
def judge(
    context: click.Context,
    endpoint: Endpoint,
    name: str,
    program: Path,
    tokenizer: Path,
    trace: Path | None,
    block_tokens: int,
    max_requests: int,
    max_output_tokens: int,
    speed: float,
    timeout_s: float,
    keep: Path | None,
    out: Path | None,
) -> None:
    """Let another benchmark send a trace, and hold what it counted against the bill, request by request.

    The exit code is 1 on any difference.
    """
    run = f"{name}-{time.time_ns():x}"
    with tempfile.TemporaryDirectory(prefix="judge-") as scratch:
        folder = Path(keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        chosen = JUDGES[name](folder, run)
        try:
            entries = _entries(trace, max_requests, block_tokens, speed, max_output_tokens)
            environment = hub_cache.lay_out(tokenizer, Path(scratch) / "hub-cache")
            command = chosen.command(program.absolute(), endpoint, entries, block_tokens)
            _run(command, folder, environment, timeout_s)
            counted = chosen.counted()
        except (TraceError, hub_cache.TokenizerError, JudgeError, OSError) as error:
            raise click.ClickException(str(error)) from error
    verdict = asyncio.run(_verdict(endpoint, counted, len(entries)))
    _print(name, verdict)
    if out is not None:
        out.write_text(json.dumps(vars(verdict), indent=2) + "\n")
    context.exit(1 if verdict.problems else 0)


def _entries(
    trace: Path | None, max_requests: int, block: int, speed: float, max_output_tokens: int
) -> list[TraceEntry]:
    source = MOONCAKE_BLOCK_TOKENS
    entries = read_trace(trace, source, max_requests) if trace else synthetic_trace(max_requests, seed=7)
    return scaled(entries, source, block, speed, max_output_tokens)


def _run(command: Sequence[str], folder: Path, variables: dict[str, str], timeout_s: float) -> None:
    """Run a judge to its end, with nothing of this process's environment that could lead it elsewhere.

    Raises:
        JudgeError: it failed, or took too long.
    """
    inherited = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    log = folder / "judge.log"
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=inherited | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JudgeError(f"the judge took longer than {timeout_s:g} s\n{_end_of(log)}") from None
    if done.returncode != 0:
        raise JudgeError(f"the judge ended with {done.returncode}\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


async def _verdict(endpoint: Endpoint, counted: Sequence[Counted], num_sent: int) -> Verdict:
    sessions = sorted({each.session for each in counted})
    async with endpoint.session(4, 60.0) as session:
        rows = await billed_rows(session, endpoint, sessions, lambda rows: len(rows) >= len(counted))
    verdict = compare(counted, rows)
    if len(counted) != num_sent:
        verdict.problems.append(f"{num_sent} requests were to be sent, {len(counted)} were counted")
    return verdict


def _print(name: str, verdict: Verdict) -> None:
    console = Console()
    table = Table("", f"counted by {name}", "billed", title="Judge", title_justify="left")
    table.add_row("requests", f"{verdict.num_counted:,}", f"{verdict.num_billed:,}")
    for figure in FIGURES:
        table.add_row(figure.replace("_", " "), f"{verdict.counted[figure]:,}", f"{verdict.billed[figure]:,}")
    console.print(table)
    for problem in verdict.problems[:20]:
        console.print(f"  {problem}", markup=False)
    console.print(f"{len(verdict.problems):,} differences in {verdict.num_counted:,} requests")
