"""Turns of a conversation meet on one replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.config import RoutingConfig
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import MODEL, Harness, Reply, gateway_config

RUN = f"/run/{MODEL}"
CHAT = "/v1/chat/completions"


def replica_of(reply: Reply) -> str:
    assert reply.status == 200
    return reply.headers["x-embergate-replica"]


@pytest.mark.parametrize("policy", ["rendezvous", "ring"])
async def test_all_turns_of_a_session_land_on_one_replica(
    start_gateway: Callable[..., Awaitable[Harness]], policy: str
) -> None:
    """BR-40, complaint A2."""
    gateway = await start_gateway(gateway_config(routing=RoutingConfig(policy=policy)))  # type: ignore[arg-type]
    counts = Counter[str]()
    for session in range(12):
        messages = [{"role": "user", "content": f"question {session}"}]
        chosen = set()
        for turn in range(3):
            path = (CHAT, RUN)[turn % 2]
            headers = {"x-session-affinity": f"ses_{session}"}
            reply = await gateway.chat(path=path, messages=messages, headers=headers, stream=turn == 2)
            chosen.add(replica_of(reply))
            messages = [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        assert len(chosen) == 1
        counts.update(chosen)
    assert len(counts) == 2


async def test_affinity_comes_from_the_header_then_the_options(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    bodies = [
        ({"x-session-affinity": "ses_1"}, {"sessionAffinity": "x", "headers": {"x-session-affinity": "y"}}),
        ({}, {"sessionAffinity": "ses_1", "headers": {"x-session-affinity": "y"}}),
        ({}, {"headers": {"X-Session-Affinity": "ses_1"}}),
    ]
    for headers, options in bodies:
        await gateway.chat(headers=headers, options=options)
    records = await gateway.stopped_records()
    assert [record.session for record in records] == ["ses_1"] * 3
    assert len({record.replica_id for record in records}) == 1


async def test_without_a_header_the_stable_prefix_decides(gateway: Harness) -> None:
    """Complaint A2: later turns repeat system and first user message, so they meet their prefix."""
    counts = Counter[str]()
    for conversation in range(12):
        messages = [
            {"role": "system", "content": f"You are assistant {conversation}."},
            {"role": "user", "content": "first"},
        ]
        chosen = set()
        for turn in range(3):
            chosen.add(replica_of(await gateway.chat(messages=messages)))
            messages = [
                *messages,
                {"role": "assistant", "content": f"answer {turn}"},
                {"role": "user", "content": f"more {turn}"},
            ]
        assert len(chosen) == 1
        counts.update(chosen)
    assert len(counts) == 2


async def test_two_gateways_agree(
    start_gateway: Callable[..., Awaitable[Harness]],
    prepared_dir: Path,
    tmp_path: Path,
    replicas: list[FakeReplica],
) -> None:
    """BR-38: no table of sessions that another gateway would not have."""
    import shutil

    first = await start_gateway()
    second = Harness(Path(shutil.copytree(prepared_dir, tmp_path / "second")), list(reversed(replicas)))
    await second.start()
    try:
        for session in range(10):
            headers = {"x-session-affinity": f"ses_{session}"}
            one = replica_of(await first.chat(headers=headers))
            assert replica_of(await second.chat(headers=headers)) == one
    finally:
        await second.stop()


async def test_a_full_owner_spills_and_gets_its_session_back(
    start_gateway: Callable[..., Awaitable[Harness]], replicas: list[FakeReplica]
) -> None:
    import asyncio

    gateway = await start_gateway(gateway_config(routing=RoutingConfig(max_in_flight=1)))
    headers = {"x-session-affinity": "ses_1"}
    owner = replica_of(await gateway.chat(headers=headers))
    for replica in replicas:
        replica.script.token_delay_s = 0.05
    replies = await asyncio.gather(*(gateway.chat(headers=headers) for _ in range(2)))
    assert {replica_of(reply) for reply in replies} == {"replica-0", "replica-1"}
    assert replica_of(await gateway.chat(headers=headers)) == owner
