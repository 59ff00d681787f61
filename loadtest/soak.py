"""``python -m loadtest soak``: locust at the machine's limit, and what it did to processes and books."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

_MIB = 2**20
_SAMPLE_S = 2.0
_GRACE_S = 120.0


@dataclass
class Memory:
    """Resident memory of a process with its children: seconds since the start, bytes."""

    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def slope_mib_per_hour(self, after_share: float = 0.5) -> float:
        """Of a straight line through the later part: the beginning fills caches."""
        skipped = int(len(self.times) * after_share)
        times, sizes = self.times[skipped:], self.sizes[skipped:]
        if len(times) < 2:
            return 0.0
        mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
        spread = sum((at - mean_time) ** 2 for at in times)
        together = sum((at - mean_time) * (size - mean_size) for at, size in zip(times, sizes, strict=True))
        return together / spread * 3600 / _MIB if spread else 0.0

    def growth_mib(self) -> float:
        """From the middle of the run to its end."""
        return (self.sizes[-1] - self.sizes[len(self.sizes) // 2]) / _MIB if self.sizes else 0.0


@click.command()
@click.option("--embergate", default="embergate", show_default=True, help="The command that asks what runs.")
@click.option("--locust", default="locust", show_default=True, help="The command of locust.")
@click.option("--url", envvar="EMBERGATE_URL", required=True, help="Of the gateway. [EMBERGATE_URL]")
@click.option("--duration", "duration_s", type=click.IntRange(min=10), default=600, show_default=True)
@click.option("--users", type=click.IntRange(min=1), default=24, show_default=True)
@click.option("--max-growth", "max_growth_mib", type=float, default=48.0, show_default=True,
              help="MiB that a process may grow by in the second half.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Keep the samples and locust's CSV and HTML there.")  # fmt: skip
@click.pass_context
def soak(
    context: click.Context,
    embergate: str,
    locust: str,
    url: str,
    duration_s: int,
    users: int,
    max_growth_mib: float,
    out: Path | None,
) -> None:
    """Run locust for long, watch the memory of all processes, then audit the books.

    The exit code is 1 when a request failed, a process grew or was restarted, or the audit found anything.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = out or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        before = _processes(embergate)
        load = _start_locust([locust, "--host", url], directory, duration_s, users)
        memory = _watch(load, {name: pid for name, (pid, _) in before.items()}, duration_s)
        problems = _problems_of_load(load, directory)
        problems += _problems_of_processes(before, _processes(embergate))
        audit = subprocess.run([embergate, "audit"], capture_output=True, text=True, check=False)
        if audit.returncode:
            problems.append(f"the audit found: {(audit.stdout + audit.stderr).strip()[-500:]}")
        problems += [
            f"{name} grew by {each.growth_mib():.0f} MiB in the second half"
            for name, each in memory.items()
            if each.growth_mib() > max_growth_mib
        ]
        _write_samples(directory / "memory.csv", memory)
        _print(directory, memory, problems, duration_s, users)
    context.exit(1 if problems else 0)


def _processes(embergate: str) -> dict[str, tuple[int, int]]:
    """Name -> (pid, restarts) of all that runs."""
    done = subprocess.run([embergate, "status", "--json"], capture_output=True, text=True, check=False)
    try:
        processes = json.loads(done.stdout)["processes"]
    except (ValueError, KeyError) as error:
        raise click.ClickException(f"`{embergate} status` does not answer: {done.stderr[-300:]}") from error
    if not processes:
        raise click.ClickException("nothing runs: `make up DETACH=1` starts it")
    return {
        each["name"]: (int(each["identity"]["pid"]), int(each["num_restarts"]))
        for each in processes
        if each["identity"]
    }


def _start_locust(
    locust: Sequence[str], directory: Path, duration_s: int, users: int
) -> subprocess.Popen[bytes]:
    locustfile = Path(__file__).with_name("locustfile.py")
    command = [
        *locust, "-f", str(locustfile), "--headless", "--only-summary", "--users", str(users),
        "--spawn-rate", "4", "--run-time", f"{duration_s}s", "--stop-timeout", "60",
        "--csv", str(directory / "soak"), "--html", str(directory / "soak.html"),
    ]  # fmt: skip
    with (directory / "locust.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _watch(load: subprocess.Popen[bytes], pids: dict[str, int], duration_s: int) -> dict[str, Memory]:
    memory = {name: Memory() for name in pids}
    start = time.monotonic()
    try:
        while load.poll() is None and time.monotonic() - start < duration_s + _GRACE_S:
            for name, pid in pids.items():
                size = _resident(pid)
                if size:
                    memory[name].times.append(time.monotonic() - start)
                    memory[name].sizes.append(size)
            time.sleep(_SAMPLE_S)
    finally:
        if load.poll() is None:
            load.terminate()
            load.wait(timeout=30)
    return memory


def _resident(pid: int) -> int:
    """Bytes of a process and its children; 0 when it is gone."""
    try:
        process = psutil.Process(pid)
        return sum(int(each.memory_info().rss) for each in [process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def _problems_of_load(load: subprocess.Popen[bytes], directory: Path) -> list[str]:
    if load.returncode == 0:
        return []
    failures = directory / "soak_failures.csv"
    rows = list(csv.DictReader(failures.open())) if failures.exists() else []
    lines = [f"{row['Occurrences']} x {row['Name']}: {row['Error'][:200]}" for row in rows]
    return lines or [f"locust ended with {load.returncode}: see {directory / 'locust.log'}"]


def _problems_of_processes(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> list[str]:
    return [f"{name} was restarted" for name, state in before.items() if after.get(name) != state]


def _write_samples(path: Path, memory: dict[str, Memory]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("process", "seconds", "resident_bytes"))
        for name, each in memory.items():
            writer.writerows(
                (name, f"{at:.1f}", size) for at, size in zip(each.times, each.sizes, strict=True)
            )


def _print(
    directory: Path, memory: dict[str, Memory], problems: Sequence[str], duration_s: int, users: int
) -> None:
    console = Console(file=sys.stdout)
    console.print((directory / "locust.log").read_text(), markup=False, highlight=False, soft_wrap=True)
    table = Table("process", "first MiB", "middle", "last", "slope MiB/h", "samples",
                  title=f"Memory over {duration_s} s with {users} users", title_justify="left")  # fmt: skip
    for name, each in memory.items():
        if each.sizes:
            first, middle, last = each.sizes[0], each.sizes[len(each.sizes) // 2], each.sizes[-1]
            table.add_row(name, *(f"{size / _MIB:.0f}" for size in (first, middle, last)),
                          f"{each.slope_mib_per_hour():+.0f}", str(len(each.sizes)))  # fmt: skip
    console.print(table)
    for problem in problems:
        console.print(f"  {problem}", markup=False)
    console.print("The soak found nothing." if not problems else f"{len(problems)} problems")
