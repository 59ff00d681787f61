"""Turns measurements of gateways into the table that the report shows."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec


class Measurement(msgspec.Struct):
    """One line of the harness: gateway ``gw`` under ``conc`` clients of one ``kind`` (times in microseconds).

    ``number`` is the round: slices of one round were neighbours in time. ``cpu_per_1k`` is CPU seconds of the
    gateway per 1,000 requests; ``busy`` how many cores of the machine were busy, with whatever.
    """

    gw: str
    kind: str
    conc: int
    number: int
    done: int
    rps: float
    p50: float
    p99: float
    ttft50: float
    cpu_per_1k: float
    pss: float
    err: int
    busy: float


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
    busy: float


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
        busy=median(one.busy for one in group),
    )


_HEAD = """# The gateway beside its peers

`make bench-gateway`: one run, one machine ({machine}, two cores), the gateway on one core, upstream and load
client on the other. `{name}` has authentication, limits, routing and durable metering on: {records} requests
were served and each has its usage record in the ledger. The peers do what their names say and meter nothing.
Absolute figures drift from machine to machine: read the ratios. {rounds} rounds of short slices in which the
gateways take turns; the first table has medians, the second the median (least to greatest) of the ratios of
slices that were neighbours in time.

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


def render(results: Sequence[Measurement], name: str, num_records: int) -> str:
    """The report as Markdown: a table of medians, and the ratios to every peer."""
    rows = medians(results)
    gateways = list(dict.fromkeys(gateway for gateway, _, _ in rows))
    num_rounds = 1 + max(result.number for result in results)
    lines = [_HEAD.format(machine=_machine(), name=name, records=f"{num_records:,}", rounds=num_rounds)]
    lines += [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(_cells(rows, gateway)) for gateway in gateways]
    peers = [gateway for gateway in gateways if gateway not in (name, "direct")]
    if peers:
        lines += ["", *_ratios(results, peers, name)]
    busy = [row.busy for row in rows.values()]
    lines += ["", f"{min(busy):.1f} to {max(busy):.1f} cores of the machine were busy during a slice.", ""]
    return "\n".join(lines)


def _rps(one: Measurement) -> float:
    return one.rps


def _cpu(one: Measurement) -> float:
    return one.cpu_per_1k


_COMPARED: tuple[tuple[str, str, int, Callable[[Measurement], float]], ...] = (
    ("plain c=1", "plain", 1, _rps),
    ("plain c=16", "plain", 16, _rps),
    ("plain c=64", "plain", 64, _rps),
    ("CPU plain", "plain", 64, _cpu),
    ("burst c=16", "stream", 16, _rps),
    ("CPU paced", "paced", 64, _cpu),
)


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


def _ratios(results: Sequence[Measurement], peers: Sequence[str], name: str) -> list[str]:
    """Median, and in brackets the least and the greatest, of the ratios of neighbouring slices."""
    slices = {(one.gw, one.kind, one.conc, one.number): one for one in results}
    titles = [title for title, _, _, _ in _COMPARED]
    lines = [_line([f"{name} / peer", *titles]), _line(["---"] * (1 + len(titles)))]
    for peer in peers:
        cells = [peer]
        for _, kind, conc, figure in _COMPARED:
            pairs = [
                figure(one) / max(figure(slices[peer, kind, conc, number]), 1e-9)
                for (gateway, *scenario, number), one in slices.items()
                if gateway == name and scenario == [kind, conc]
            ]
            cells.append(f"**{median(pairs):.2f}** ({min(pairs):.2f} to {max(pairs):.2f})")
        lines.append(_line(cells))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}"
