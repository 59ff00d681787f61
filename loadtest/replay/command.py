"""``python -m loadtest replay``"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from loadtest.exchange import Endpoint, Exchange, ask
from loadtest.options import endpoint_options
from loadtest.replay.calibration import Calibration, CalibrationError, calibrate
from loadtest.replay.player import Played, play
from loadtest.replay.prompts import Prompt, PromptMaker, ideal_cached_tokens
from loadtest.replay.report import ReplayReport, Targets, print_report, report_of
from loadtest.replay.trace import MOONCAKE_BLOCK_TOKENS, TraceEntry, TraceError, read_trace, synthetic_trace


@dataclass(frozen=True)
class Pace:
    """How a trace is played. ``length`` shrinks blocks, prompts and answers alike."""

    speed: float
    length: float
    source_block_tokens: int
    max_in_flight: int
    max_duration_s: float
    timeout_s: float
    seed: int


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="In Mooncake's format; without it one is made up.")  # fmt: skip
@click.option("--block-tokens", type=click.IntRange(min=1), default=MOONCAKE_BLOCK_TOKENS, show_default=True,
              help="What a hash id of the trace stands for.")  # fmt: skip
@click.option("--length", type=click.FloatRange(0.001, 1.0), default=0.0625, show_default=True,
              help="How long prompts and answers are beside the trace's.")  # fmt: skip
@click.option("--speed", type=click.FloatRange(min=0.001), default=4.0, show_default=True,
              help="How much faster than the trace requests are sent.")  # fmt: skip
@click.option("--max-requests", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--max-in-flight", type=click.IntRange(min=1), default=64, show_default=True,
              help="Further requests wait, and the report says how long.")  # fmt: skip
@click.option("--max-duration", "max_duration_s", type=float, default=120.0, show_default=True,
              help="Seconds after which nothing more is sent.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=float, default=120.0, show_default=True,
              help="Seconds for one answer.")  # fmt: skip
@click.option("--ttft", "ttft_s", type=float, default=2.0, show_default=True, help="Target, seconds.")
@click.option("--tpot", "tpot_s", type=float, default=0.2, show_default=True, help="Target, seconds a token.")
@click.option("--min-good", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Share of requests that must meet both targets.")  # fmt: skip
@click.option("--min-cached-of-ideal", type=click.FloatRange(0, 1), default=0.0, show_default=True)
@click.option("--max-failures", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--seed", type=int, help="Of the words; the clock's, where it is not given, finds nothing cached."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="JSON too.")
@endpoint_options
@click.pass_context
def replay(
    context: click.Context,
    endpoint: Endpoint,
    trace: Path | None,
    block_tokens: int,
    max_requests: int,
    ttft_s: float,
    tpot_s: float,
    min_good: float,
    min_cached_of_ideal: float,
    max_failures: int,
    out: Path | None,
    seed: int | None,
    length: float,
    speed: float,
    max_in_flight: int,
    max_duration_s: float,
    timeout_s: float,
) -> None:
    """Play a trace against the gateway, open loop, and report what it was like.

    The exit code is 1 when a bar is missed or the API counted a prompt otherwise than it was made.
    """
    seed = time.time_ns() if seed is None else seed
    pace = Pace(speed, length, block_tokens, max_in_flight, max_duration_s, timeout_s, seed)
    try:
        entries = read_trace(trace, block_tokens, max_requests) if trace else synthetic_trace(max_requests, 7)
        report = asyncio.run(_replay(endpoint, entries, pace, Targets(ttft_s, tpot_s)))
    except (TraceError, CalibrationError, OSError) as error:
        raise click.ClickException(str(error)) from error
    print_report(report, Console())
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    missed = list(_missed(report, min_good, min_cached_of_ideal, max_failures))
    for line in missed:
        click.echo(f"MISSED {line}", err=True)
    context.exit(1 if missed else 0)


def _missed(
    report: ReplayReport, min_good: float, min_cached_of_ideal: float, max_failures: int
) -> Sequence[str]:
    missed = []
    num_failed = sum(report.errors.values())
    if report.num_requests == 0:
        missed.append("no request was made")
    if num_failed > max_failures:
        missed.append(f"{num_failed} requests failed, at most {max_failures} may")
    if report.miscounted:
        missed.append(f"{report.miscounted} prompts were counted otherwise than they were made")
    if report.good_share < min_good:
        missed.append(f"{report.good_share:.1%} of the requests were good, {min_good:.1%} must be")
    if report.cached_tokens < min_cached_of_ideal * report.ideal_cached_tokens:
        missed.append(f"{report.cached_share:.1%} were cached where {report.ideal_share:.1%} could be")
    return missed


async def _replay(
    endpoint: Endpoint, entries: Sequence[TraceEntry], pace: Pace, targets: Targets
) -> ReplayReport:
    async with endpoint.session(pace.max_in_flight, pace.timeout_s) as session:
        click.echo("Measuring what the chat template adds ...", err=True)
        calibration = await calibrated(session, endpoint, pace.seed)
        prompts = prompts_of(entries, calibration, pace)
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("Replaying", total=len(prompts))
            played = await replayed(
                session, endpoint, prompts, pace, lambda done: bar.update(task, completed=done)
            )
    done = {id(each.prompt) for each in played if each.exchange.is_whole}
    ideal = ideal_cached_tokens([each for each in prompts if id(each) in done], calibration.block_tokens)
    return report_of(played, len(prompts) - len(played), ideal, targets)


async def calibrated(session: aiohttp.ClientSession, endpoint: Endpoint, seed: int) -> Calibration:
    """Measure the model's template. Raises CalibrationError."""

    async def probe(text: str) -> tuple[int, int]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
        exchange = await ask(session, endpoint, body, affinity=f"calibration-{seed}")
        if exchange.error:
            raise CalibrationError(f"{endpoint.url} does not answer as it should: {exchange.error}")
        return exchange.prompt_tokens, exchange.cached_tokens

    calibration = await calibrate(probe, seed)
    if calibration.block_tokens:
        click.echo(
            f"{calibration.prefix_tokens} tokens before the words, {calibration.suffix_tokens} behind them, "
            f"blocks of {calibration.block_tokens}.",
            err=True,
        )
    else:
        click.echo("Nothing is ever cached here.", err=True)
    return calibration


def prompts_of(entries: Sequence[TraceEntry], calibration: Calibration, pace: Pace) -> list[Prompt]:
    """The entries at the pace's scale; an id becomes a whole number of the engine's blocks."""
    engine_block = calibration.block_tokens or 1
    block = max(1, round(pace.source_block_tokens * pace.length / engine_block)) * engine_block
    maker = PromptMaker(calibration, pace.source_block_tokens, block, pace.seed)
    return [maker.prompt(entry) for entry in entries]


async def replayed(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    pace: Pace,
    progress: object,
) -> list[Played]:
    """Play prompts; answers go on to their full length."""
    assert callable(progress)

    async def send(prompt: Prompt) -> Exchange:
        body = {
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": prompt.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        return await ask(session, endpoint, body, affinity=prompt.entry.affinity)

    return await play(
        prompts, send, speed=pace.speed, max_in_flight=pace.max_in_flight,
        max_duration_s=pace.max_duration_s, progress=progress,
    )  # fmt: skip
