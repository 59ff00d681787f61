"""What an agent's run cost, what caching saved, and what another rate card would have charged.

Shared by the example agents. The gateway answers all of it at ``/ai/savings``, a moment after the requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from openai import OpenAI

_SESSIONS_PER_QUESTION = 50
_NANOS = 1_000_000_000


@dataclass
class Bill:
    """Sums of one run. Money in nano-dollars; ``elsewhere`` by the name of the other price list."""

    num_requests: int = 0
    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0
    amount: int = 0
    undiscounted: int = 0
    elsewhere: dict[str, int] | None = None

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens, those that came from the cache."""
        num_prompt = self.num_input + self.num_cached
        return self.num_cached / num_prompt if num_prompt else 0.0

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "cached_share": round(self.cached_share, 4)}

    def lines(self) -> list[str]:
        """For people."""
        saved = self.undiscounted - self.amount
        share = saved / self.undiscounted if self.undiscounted else 0.0
        return [
            f"{self.num_requests} requests: {self.num_input + self.num_cached:,} prompt tokens, "
            f"{self.cached_share:.1%} of them cached; {self.num_output:,} tokens of answers",
            f"  cost                    {dollars(self.amount)}",
            f"  saved by caching        {dollars(saved)} ({share:.1%})",
            *(f"  on {name:<32} {dollars(nanos)}" for name, nanos in (self.elsewhere or {}).items()),
        ]


def dollars(nanos: int) -> str:
    return f"${nanos / _NANOS:.6f}"


def connect() -> OpenAI:
    """A client of the gateway at EMBERGATE_URL, for the account of EMBERGATE_API_TOKEN."""
    return OpenAI(
        base_url=f"{variable('EMBERGATE_URL')}/v1", api_key=variable("EMBERGATE_API_TOKEN"), timeout=600
    )


def variable(name: str) -> str:
    """A variable of the environment, which ``.embergate/dev.env`` sets."""
    if name not in os.environ:
        raise SystemExit(f"{name} is not set: `set -a; . .embergate/dev.env; set +a` sets it")
    return os.environ[name]


def bill_of(client: OpenAI, num_requests: int, **filters: str | Sequence[str]) -> Bill:
    """What the gateway has on its books for ``session=...`` or ``batch=...``, once all of it is there.

    Raises:
        TimeoutError: so many requests are not on the books within half a minute.
    """
    deadline = time.monotonic() + 30
    while True:
        bill = _bill_now(client, filters)
        if bill.num_requests >= num_requests:
            return bill
        if time.monotonic() > deadline:
            raise TimeoutError(f"{bill.num_requests} of {num_requests} requests are on the books")
        time.sleep(0.2)


def _bill_now(client: OpenAI, filters: dict[str, str | Sequence[str]]) -> Bill:
    bill = Bill(elsewhere={})
    for question in _questions(filters):
        found = _savings(client, question)
        bill.num_requests += found["num_requests"]
        bill.num_input += found["tokens"]["num_input"]
        bill.num_cached += found["tokens"]["num_cached"]
        bill.num_output += found["tokens"]["num_output"]
        bill.amount += found["amount_nanos"]
        bill.undiscounted += found["undiscounted_nanos"]
        assert bill.elsewhere is not None
        for other in found["comparisons"]:
            bill.elsewhere[other["name"]] = bill.elsewhere.get(other["name"], 0) + other["amount_nanos"]
    return bill


def _questions(filters: dict[str, str | Sequence[str]]) -> list[dict[str, str | Sequence[str]]]:
    """One, or several where there are more sessions than one may name."""
    sessions = filters.get("session", "")
    if isinstance(sessions, str):
        return [filters]
    starts = range(0, len(sessions), _SESSIONS_PER_QUESTION)
    return [filters | {"session": sessions[start : start + _SESSIONS_PER_QUESTION]} for start in starts]


def _savings(client: OpenAI, question: dict[str, str | Sequence[str]]) -> dict[str, Any]:
    """The OpenAI client carries the request: it has the address, the token and the retries."""
    account = f"{variable('EMBERGATE_URL')}/client/v4/accounts/{variable('EMBERGATE_ACCOUNT_ID')}"
    query = urlencode(question, doseq=True)
    answer: dict[str, Any] = client.get(f"{account}/ai/savings?{query}", cast_to=dict[str, Any])
    result: dict[str, Any] = answer["result"]
    return result
