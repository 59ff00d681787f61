"""Reading an installation's books once nothing is on its way into them."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.installation import Installation

_ON_THE_WAY = (
    "litellm_in_flight_requests",
    "embergate_metering_pending_records",
    "embergate_metering_unposted_records",
)
"""In the order in which a request passes them, and in which the gateway counts them for one answer: when all
are zero there, every request that it had taken is posted.
"""


def settle(installation: Installation, timeout_s: float = 60.0) -> None:
    """Return when the gateway has posted all that it served, also for clients that went away.

    An answer that a client has read to its end, and a request that it gave up, are in the ledger then. Raises
    AssertionError when that takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while waiting := _on_the_way(installation):
        assert time.monotonic() < deadline, f"not settled after {timeout_s:g} s: {waiting}"
        time.sleep(0.1)


def settled_usage(installation: Installation, *arguments: str) -> Any:
    """What ``embergate usage`` answers with ``arguments`` when the books are :func:`settle`-d."""
    settle(installation)
    return installation.run_json("usage", *arguments)


async def settled_totals(installation: Installation, num_requests: int | None = None) -> dict[str, Any]:
    """The development account's whole usage; ``num_requests``: how many it has to count."""
    account_id = installation.account.account_id
    answer = await asyncio.to_thread(settled_usage, installation, "--account", account_id)
    total: dict[str, Any] = answer["total"]
    assert num_requests is None or total["num_requests"] == num_requests, total
    return total


def _on_the_way(installation: Installation) -> dict[str, float] | str:
    """What is not in the ledger yet, by where it is; or why there is no telling."""
    try:
        with urllib.request.urlopen(f"{installation.url}/metrics", timeout=10) as response:
            text = response.read().decode()
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        return f"no answer: {error}"
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    return {name: samples[name] for name in _ON_THE_WAY if samples[name]}
