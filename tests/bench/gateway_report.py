"""Turns measurements of gateways into the table that the report shows."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

import msgspec


class Measurement(msgspec.Struct):
    """One line of the harness: gateway ``gw`` under ``conc`` clients of one ``kind`` (times in microseconds).

    ``cpu_per_1k`` is CPU seconds of the gateway per 1,000 requests; ``other`` the share of the machine that
    processes outside of the measurement took.
    """

    gw: str
    kind: str
    conc: int
    done: int
    rps: float
    p50: float
    p99: float
    ttft50: float
    cpu_per_1k: float
    pss: float
    err: int
    other: float


Key = tuple[str, str, int]


class Row(msgspec.Struct):
    """Medians over the rounds."""

    rps: float
    p50: float
    p99: float
    ttft50: float
    cpu_per_1k: float
    pss: float
    err: int
    other: float


def medians(results: Iterable[Measurement]) -> dict[Key, Row]:
    groups: dict[Key, list[Measurement]] = defaultdict(list)
    for result in results:
        groups[result.gw, result.kind, result.conc].append(result)
    return {key: _median(group) for key, group in groups.items()}


def _median(group: list[Measurement]) -> Row:
    return Row(
        rps=median(one.rps for one in group),
        p50=median(one.p50 for one in group),
        p99=median(one.p99 for one in group),
        ttft50=median(one.ttft50 for one in group),
        cpu_per_1k=median(one.cpu_per_1k for one in group),
        pss=median(one.pss for one in group),
        err=sum(one.err for one in group),
        other=median(one.other for one in group),
    )


_HEAD = """# The gateway beside its peers

`make bench-gateway`: one run, one machine ({machine}, two cores), the gateway on one core, upstream and load
client on the other. `{name}` has authentication, limits, routing and durable metering on: {records} requests
were served and each has its usage record in the ledger. The peers do what their names say and meter nothing.
Absolute figures drift from machine to machine: read the ratios.

- plain: answers in one piece, requests per second at 1, 16 and 64 connections.
- added: what the gateway adds to the latency of one connection, in microseconds (p50, p99).
- CPU plain, CPU paced: CPU seconds of the gateway per 1,000 requests (64 connections), and per 1,000 streams
  of 64 chunks, one each 5 ms (64 streams at once).
- burst: streams per second whose 67 events come at once (16 connections).

"""
_COLUMNS = (
    "gateway",
    "plain c=1",
    "plain c=16",
    "plain c=64",
    "added p50",
    "added p99",
    "CPU plain",
    "burst c=16",
    "CPU paced",
    "first chunk p50 (paced)",
    "memory MB",
    "errors",
)


def render(rows: dict[Key, Row], name: str, num_records: int) -> str:
    """The report as Markdown: a table of medians, and the ratios to the bare aiohttp pass-through."""
    gateways = list(dict.fromkeys(gateway for gateway, _, _ in rows))
    lines = [_HEAD.format(machine=_machine(), name=name, records=f"{num_records:,}")]
    lines += [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(_cells(rows, gateway)) for gateway in gateways]
    if "aiohttp" in gateways and name in gateways:
        lines += ["", *_ratios(rows, gateways, name)]
    busy = max(row.other for row in rows.values())
    lines += ["", f"Other processes took at most {busy:.0%} of one core during a measurement.", ""]
    return "\n".join(lines)


def _cells(rows: dict[Key, Row], gateway: str) -> list[str]:
    plain = {conc: rows[gateway, "plain", conc] for conc in (1, 16, 64)}
    burst, paced = rows[gateway, "stream", 16], rows[gateway, "paced", 64]
    direct = rows.get(("direct", "plain", 1))
    added = ["-", "-"]
    if direct is not None and gateway != "direct":
        added = [f"{plain[1].p50 - direct.p50:,.0f}", f"{plain[1].p99 - direct.p99:,.0f}"]
    num_errors = sum(row.err for (named, _, _), row in rows.items() if named == gateway)
    return [
        gateway,
        *(f"{plain[conc].rps:,.0f}" for conc in (1, 16, 64)),
        *added,
        f"{plain[64].cpu_per_1k:.3f}",
        f"{burst.rps:,.0f}",
        f"{paced.cpu_per_1k:.2f}",
        f"{paced.ttft50:,.0f}",
        f"{plain[64].pss:.0f}",
        str(num_errors),
    ]


def _ratios(rows: dict[Key, Row], gateways: list[str], name: str) -> list[str]:
    lines = [
        _line(
            [
                f"{name} / peer",
                "plain c=1",
                "plain c=16",
                "plain c=64",
                "CPU plain",
                "burst c=16",
                "CPU paced",
            ]
        ),
        _line(["---"] * 7),
    ]
    for peer in gateways:
        if peer in (name, "direct"):
            continue
        ratios = [rows[name, "plain", conc].rps / rows[peer, "plain", conc].rps for conc in (1, 16, 64)]
        ratios += [
            rows[name, "plain", 64].cpu_per_1k / max(rows[peer, "plain", 64].cpu_per_1k, 1e-9),
            rows[name, "stream", 16].rps / rows[peer, "stream", 16].rps,
            rows[name, "paced", 64].cpu_per_1k / max(rows[peer, "paced", 64].cpu_per_1k, 1e-9),
        ]
        lines.append(_line([peer, *(f"{ratio:.2f}" for ratio in ratios)]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}"
