"""Measures the gateway beside its peers, in one run: ``make bench-gateway``.

The harness lies in a directory named by EMBERGATE_BENCH_DIR (default: ``../shared/bench`` beside the
repository): ``setup_peers.sh`` installs the peers under PEERS (default ``~/.cache/embergate-peers``) and
``gateway/`` holds what is sent. Upstream and load client run on core 0, the gateway on core 1.
Authentication, limits, routing and durable metering are on in the gateway and are checked afterwards: as many
usage records as served requests.

Gateways take turns in slices of S seconds, so that what else the machine does disturbs all of them alike;
what is reported is the median of the ratios of neighbouring slices. Refuses to start when a port that it
needs is busy.

Options: --rounds N, --seconds S, --peers NAME ..., --write (docs/reports/gateway.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
from tests.bench.gateway_processes import Peer, PortBusyError, known_peers
from tests.bench.gateway_report import Measurement, render
from tests.bench.gateway_slices import Bench

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "reports" / "gateway.md"
NAME = "embergate"
PORT = 9020
TOKEN = "sk-bench"  # what the load client sends
ACCOUNT = "be" * 16
PATH = f"/client/v4/accounts/{ACCOUNT}/ai/v1/chat/completions"
DEFAULT_PEERS = ["direct", "nginx", "aiohttp", "sglang-router-rr", "vllm-router-rr"]
INSTALLS = {  # what of the harness's set-up the peers of a name need, and what shows that it is there
    "nginx": ("nginx", "/usr/sbin/nginx"),
    "aiohttp": ("aiohttp", "aiohttp/bin/python"),
    "sglang": ("sglang", "sglrouter/bin/python"),
    "vllm": ("vllm-router", "vllmrouter/bin/vllm-router"),
    "litellm": ("litellm", "litellm/bin/litellm"),
}


def main() -> int:
    options = _options()
    bench_dir = Path(os.environ.get("EMBERGATE_BENCH_DIR", ROOT.parent / "shared" / "bench"))
    if not (bench_dir / "gateway" / "body_plain.json").is_file():
        print(f"No benchmark harness at {bench_dir}. Set EMBERGATE_BENCH_DIR to the directory that has it.")
        return 2
    if len(os.sched_getaffinity(0)) < 2:
        print("The benchmark needs two cores: one for the gateway, one for upstream and load client.")
        return 2
    peers_dir = Path(os.environ.get("PEERS", Path.home() / ".cache" / "embergate-peers"))
    _set_up(bench_dir, peers_dir, options.peers)
    with tempfile.TemporaryDirectory(prefix="embergate-bench-") as name:
        data_dir = Path(name)
        _prepare(data_dir)
        try:
            results = _measure(bench_dir, peers_dir, data_dir, options)
        except PortBusyError as error:
            print(f"The benchmark cannot start: {error}")
            return 2
        served, recorded = _served(results), _num_records(data_dir)
    if recorded < served:
        print(f"FAILED: {served} requests were served and only {recorded} usage records are in the ledger")
        return 1
    text = render(results, NAME, recorded)
    print(text)
    if options.write:
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(text)
        print(f"written to {REPORT.relative_to(ROOT)}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_gateway", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--peers", nargs="*", default=DEFAULT_PEERS)
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


def _set_up(bench_dir: Path, peers_dir: Path, peers: list[str]) -> None:
    """Install what is missing; the upstream and the load client come with any of it."""
    wanted = [
        install
        for prefix, (install, sign) in INSTALLS.items()
        if any(peer.startswith(prefix) for peer in peers) and not (peers_dir / sign).exists()
    ]
    if wanted or not (peers_dir / "loadgen").exists():
        print(f"installing peers under {peers_dir} ...", flush=True)
        environment = os.environ | {"PEERS": str(peers_dir)}
        subprocess.run(
            ["bash", str(bench_dir / "setup_peers.sh"), *(wanted or ["aiohttp"])], env=environment, check=True
        )


def _prepare(data_dir: Path) -> None:
    """An account with the load client's token, and the gateway's configuration."""
    models = [ServedModel(id="mock"), ServedModel(id="paced")]
    cards = [
        RateCardConfig(
            model=model.id, effective_from="2025-01-01", input="0.60", output="3.00", cached_input="0.10"
        )
        for model in models
    ]
    billing = BillingConfig(rate_cards=cards)
    unlimited = RateLimits(requests_per_minute=10_000_000, max_concurrent_requests=100_000)
    process = GatewayProcess(
        data_dir=str(data_dir),
        models=models,
        replicas=[ReplicaAddress(id="mock", url="http://127.0.0.1:9000")],
        billing=billing,
        gateway=GatewayConfig(
            port=PORT,
            limits=LimitsConfig(default=unlimited),
            telemetry=TelemetryConfig(log_level="warning"),
        ),
    )
    (data_dir / "gateway.json").write_bytes(msgspec.json.encode(process))
    store = Store.open(billing.database_url_in(data_dir))
    directory = AccountDirectory(store)
    directory.create_account("bench", ACCOUNT)
    directory._add_token(ACCOUNT, TOKEN, "bench", PERMISSIONS)  # shorter than what import_token lets through
    store.close()


def _measure(
    bench_dir: Path, peers_dir: Path, data_dir: Path, options: argparse.Namespace
) -> list[Measurement]:
    """Raises PortBusyError."""
    known = known_peers(bench_dir, peers_dir)
    unknown = [peer for peer in options.peers if peer not in known]
    if unknown:
        sys.exit(f"unknown peers {', '.join(unknown)}; known are {', '.join(known)}")
    command = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "gateway", str(data_dir / "gateway.json"))
    peers = [*(known[peer] for peer in options.peers), Peer(NAME, PORT, command, PATH)]
    results: list[Measurement] = []
    with Bench(bench_dir, peers_dir, peers, data_dir) as bench:
        for one in bench.measure(options.rounds, options.seconds):
            results.append(one)
            print(
                f"{one.number} {one.gw:18} {one.kind:6} c={one.conc:<3} {one.rps:9,.0f}/s "
                f"p50 {one.p50:7.0f} us, CPU {one.cpu_per_1k:.3f} s/1000, "
                f"errors {one.err}, {one.busy:.1f} cores busy",
                flush=True,
            )
    return results


def _served(results: list[Measurement]) -> int:
    return sum(result.done for result in results if result.gw == NAME)


def _num_records(data_dir: Path) -> int:
    store = Store.open(BillingConfig().database_url_in(data_dir))
    try:
        with store.reading() as connection:
            return connection.execute(select(func.count()).select_from(schema.usage_records)).scalar_one()
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main())
