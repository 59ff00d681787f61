"""What replicas remember of requests that ended, for the audit to find on the books."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec

from backend.wire import RecentUsage, RecentUsages
from billing.audit import ReplicaUsage
from gateway.config import ReplicaAddress
from gateway.secret_files import POOL_TOKEN, load_or_create
from gateway.wire.replica import decode_billing_context

_TIMEOUT_S = 5.0
_MAX_PAGE_BYTES = 64 * 1024 * 1024
_MICROS = 1_000_000


def read_replica_usages(
    addresses: Sequence[ReplicaAddress], secrets_dir: Path
) -> tuple[list[ReplicaUsage], list[str]]:
    """The usages of all replicas that answer, and the ids of those that do not."""
    token = load_or_create(secrets_dir, POOL_TOKEN)
    usages: list[ReplicaUsage] = []
    silent: list[str] = []
    for address in addresses:
        try:
            usages += _read_all(address, token)
        except (OSError, http.client.HTTPException, msgspec.DecodeError):
            silent.append(address.id)
    return usages, silent


def _read_all(address: ReplicaAddress, token: str) -> list[ReplicaUsage]:
    usages: list[ReplicaUsage] = []
    page = _read_page(address, token, 0)
    while page.usages:
        usages += filter(None, (_usage(page.replica_id, recent) for recent in page.usages))
        page = _read_page(address, token, page.next_after)
    return usages


def _usage(replica_id: str, recent: RecentUsage) -> ReplicaUsage | None:
    """None for a request that did not come through a gateway."""
    context = decode_billing_context(recent.billing_context)
    if context is None:
        return None
    return ReplicaUsage(
        replica_id=replica_id,
        request_id=recent.request_id,
        prompt_tokens=recent.usage.prompt_tokens,
        cached_prompt_tokens=recent.usage.cached_prompt_tokens,
        completion_tokens=recent.usage.completion_tokens,
        finished_at_us=int(recent.finished_at * _MICROS),
        is_attempt=context.surface == "batch",
    )


def _read_page(address: ReplicaAddress, token: str, after: int) -> RecentUsages:
    request = urllib.request.Request(
        f"{address.url.rstrip('/')}/usages?after={after}", headers={"authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        return msgspec.json.decode(response.read(_MAX_PAGE_BYTES), type=RecentUsages)
