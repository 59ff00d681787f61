"""What durable metering costs: ``python -m tests.bench.bench_metering``.

Three gateways take turns in short slices: usage records go nowhere, to SQLite, to PostgreSQL (a server of the
bench's own that flushes its commits). Everything else is the same path: authentication, limits, routing.
Reported are the medians of the ratios of slices that were neighbours in time. Harness, cores and options are
those of :mod:`tests.bench.bench_gateway`; the database shares the core of upstream and load client.

Options: --rounds N, --seconds S, --write (docs/reports/metering.md).
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from sqlalchemy import func, select

from billing import schema
from billing.accounts import PERMISSIONS, AccountDirectory
from billing.config import BillingConfig, RateCardConfig
from billing.store import Store
from gateway.__main__ import GatewayProcess
from gateway.config import (
    GatewayConfig,
    LimitsConfig,
    RateLimits,
    ReplicaAddress,
    ServedModel,
    TelemetryConfig,
)
from tests.bench.bench_gateway import ACCOUNT, PATH, ROOT, TOKEN
from tests.bench.gateway_processes import LOAD_CORE, UPSTREAM_PORT, Peer
from tests.bench.gateway_report import Measurement
from tests.bench.gateway_slices import SCENARIOS, Bench
from tests.support.postgres import PostgresServer

REPORT = ROOT / "docs" / "reports" / "metering.md"
UNMETERED = "unmetered"
MODULES = {UNMETERED: "tests.bench.unmetered_gateway", "sqlite": "gateway", "postgres": "gateway"}
FIRST_PORT = 9040


def main() -> int:
    options = _options()
    bench_dir = Path(os.environ.get("EMBERGATE_BENCH_DIR", ROOT.parent / "shared" / "bench"))
    peers_dir = Path(os.environ.get("PEERS", Path.home() / ".cache" / "embergate-peers"))
    if not (bench_dir / "gateway" / "body_plain.json").is_file() or not (peers_dir / "loadgen").exists():
        print("No benchmark harness here: run tests.bench.bench_gateway once, which sets it up.")
        return 2
    os.sched_setaffinity(0, {LOAD_CORE})  # the database server inherits it; gateways are placed by themselves
    server = PostgresServer(is_flushing=True)
    try:
        server.start()
        with tempfile.TemporaryDirectory(prefix="embergate-bench-") as name:
            stores = {
                UNMETERED: f"sqlite:///{name}/unmetered.db",
                "sqlite": f"sqlite:///{name}/metered.db",
                "postgres": server.create("bench"),
            }
            results = _measure(bench_dir, peers_dir, Path(name), stores, options)
            recorded = {kind: _num_records(url) for kind, url in stores.items()}
    finally:
        server.remove()
    for kind in ("sqlite", "postgres"):
        served = sum(one.done for one in results if one.gw == kind)
        if recorded[kind] < served:
            print(f"FAILED: {served} requests were served and {recorded[kind]} records are in {kind}")
            return 1
    text = _render(results, recorded, options.rounds)
    print(text)
    if options.write:
        REPORT.write_text(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_metering", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


def _measure(
    bench_dir: Path, peers_dir: Path, home: Path, stores: dict[str, str], options: argparse.Namespace
) -> list[Measurement]:
    peers = [_prepare(home, kind, url, FIRST_PORT + n) for n, (kind, url) in enumerate(stores.items())]
    results: list[Measurement] = []
    with Bench(bench_dir, peers_dir, peers, home) as bench:
        for one in bench.measure(options.rounds, options.seconds):
            results.append(one)
            print(f"{one.number} {one.gw:10} {one.kind:6} c={one.conc:<3} {one.rps:9,.0f}/s "
                  f"CPU {one.cpu_per_1k:.3f} s/1000, errors {one.err}", flush=True)  # fmt: skip
    return results


def _prepare(home: Path, kind: str, url: str, port: int) -> Peer:
    """The configuration, database and account of one gateway."""
    models = [ServedModel(id="mock"), ServedModel(id="paced")]
    cards = [
        RateCardConfig(
            model=model.id, effective_from="2025-01-01", input="0.60", output="3.00", cached_input="0.10"
        )
        for model in models
    ]
    unlimited = RateLimits(requests_per_minute=10_000_000, max_concurrent_requests=100_000)
    data_dir = home / kind
    data_dir.mkdir()
    process = GatewayProcess(
        data_dir=str(data_dir),
        models=models,
        replicas=[ReplicaAddress(id="mock", url=f"http://127.0.0.1:{UPSTREAM_PORT}")],
        billing=BillingConfig(database_url=url, rate_cards=cards),
        gateway=GatewayConfig(
            port=port,
            limits=LimitsConfig(default=unlimited),
            telemetry=TelemetryConfig(log_level="warning"),
        ),
    )
    file = data_dir / "gateway.json"
    file.write_bytes(msgspec.json.encode(process))
    store = Store.open(url)
    directory = AccountDirectory(store)
    directory.create_account("bench", ACCOUNT)
    directory._add_token(ACCOUNT, TOKEN, "bench", PERMISSIONS)  # shorter than what import_token lets through
    store.close()
    command = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", MODULES[kind], str(file))
    return Peer(kind, port, command, PATH)


def _num_records(url: str) -> int:
    store = Store.open(url)
    try:
        with store.reading() as connection:
            return connection.scalar(select(func.count()).select_from(schema.usage_records)) or 0
    finally:
        store.close()


def _render(results: Sequence[Measurement], recorded: dict[str, int], rounds: int) -> str:
    slices = {(one.gw, one.kind, one.conc, one.number): one for one in results}
    lines = [
        "# What durable metering costs",
        "",
        f"`python -m tests.bench.bench_metering --rounds {rounds}` on a busy machine of two cores "
        f"({platform.machine()}, Python {platform.python_version()}):",
        "the gateway on one core, upstream, load client and database server on the other. Shares are medians",
        "(least to greatest) of ratios to the neighbouring slice of the gateway with metering off. CPU is",
        "the gateway's own, per request: above 1 means that metering costs that much more. What is posted",
        "after a slice falls into the next, another gateway's; every other round turns the order round.",
        "",
        "| scenario | unmetered requests/s | SQLite | PostgreSQL | SQLite, CPU | PostgreSQL, CPU |",
        "|---|---|---|---|---|---|",
    ]
    for kind, conc in SCENARIOS:
        base = [slices[UNMETERED, kind, conc, number] for number in range(rounds)]
        cells = [f"{kind} c={conc}", f"{median(one.rps for one in base):,.0f}"]
        for figure in ("rps", "cpu_per_1k"):
            for store in ("sqlite", "postgres"):
                ratios = [
                    getattr(slices[store, kind, conc, one.number], figure) / max(getattr(one, figure), 1e-9)
                    for one in base
                ]
                cells.append(f"**{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    num_errors = sum(one.err for one in results)
    lines += [
        "",
        f"{recorded['sqlite']:,} records in SQLite and {recorded['postgres']:,} in PostgreSQL: one for each "
        f"request served. Errors: {num_errors}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
