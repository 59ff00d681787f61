"""Reading what replicas remember, over HTTP, a page at a time."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from backend.wire import RecentUsage, TokenUsage
from embergate.replica_usages import read_replica_usages
from gateway.config import ReplicaAddress
from gateway.wire.replica import BillingContext, encode_billing_context
from tests.support.fake_replica import FakeReplica


def recent(sequence: int, surface: str | None) -> RecentUsage:
    context = ""
    if surface is not None:
        context = encode_billing_context(
            BillingContext(
                account_id="0" * 32, token_id="t", model="m", requested_model="m",
                surface=surface, session="", started_at_us=1,  # type: ignore[arg-type]
            )
        )  # fmt: skip
    return RecentUsage(
        sequence=sequence,
        request_id=f"request-{sequence}",
        billing_context=context,
        usage=TokenUsage.of(prompt=10, cached=4, completion=2),
        finish_reason="stop",
        finished_at=12.5,
    )


async def test_all_replicas_are_read_and_the_silent_ones_named(tmp_path: Path) -> None:
    replica = FakeReplica("replica-0")
    await replica.start()
    replica.usages = [recent(1, "run"), recent(2, "batch"), recent(3, None)]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    addresses = [
        ReplicaAddress(id="replica-0", url=replica.url),
        ReplicaAddress(id="replica-1", url=f"http://127.0.0.1:{port}"),
    ]
    try:
        usages, silent = await asyncio.to_thread(read_replica_usages, addresses, tmp_path)
    finally:
        await replica.stop()
    assert silent == ["replica-1"]
    assert [(usage.request_id, usage.is_attempt) for usage in usages] == [
        ("request-1", False),
        ("request-2", True),
    ]
    assert (usages[0].cached_prompt_tokens, usages[0].finished_at_us) == (4, 12_500_000)
