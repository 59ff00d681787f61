"""Replicas that die, stall, fail or drain; clients that leave: what is seen outside, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from backend.wire import ErrorDetail
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import MODEL, TOKEN, Harness, gateway_config
from tests.support.waiting import eventually

RUN = f"/run/{MODEL}"
CHAT = "/v1/chat/completions"
StartGateway = Callable[..., Awaitable[Harness]]


def owner_of(replicas: list[FakeReplica]) -> FakeReplica:
    """The replica that served the last request."""
    return max(replicas, key=lambda replica: len(replica.requests))


async def find_owner(gateway: Harness, replicas: list[FakeReplica], session: str) -> FakeReplica:
    """The replica that owns a session; forgets the request that found it out."""
    reply = await gateway.chat(headers={"x-session-affinity": session})
    assert reply.status == 200
    for replica in replicas:
        replica.requests.clear()
    return next(replica for replica in replicas if replica.id == reply.headers["x-embergate-replica"])


def other_of(replicas: list[FakeReplica], one: FakeReplica) -> FakeReplica:
    return next(replica for replica in replicas if replica is not one)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_dies_before_the_first_byte_is_replaced_unnoticed(
    gateway: Harness, replicas: list[FakeReplica], stream: bool
) -> None:
    owner = await find_owner(gateway, replicas, "s")
    owner.script.die_before_head = True
    reply = await gateway.chat(stream=stream, headers={"x-session-affinity": "s"})
    assert reply.status == 200
    assert reply.headers["x-embergate-replica"] == other_of(replicas, owner).id
    text = reply.text if stream else reply.json["choices"][0]["message"]["content"]
    assert text == "Hello, world"
    records = await gateway.stopped_records()
    assert [record.status for record in records] == ["ok", "ok"]
    assert records[1].num_attempts == 2
    assert records[1].replica_id == reply.headers["x-embergate-replica"]


async def test_a_stream_that_dies_before_its_first_chunk_is_replaced_unnoticed(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    """The replica's 200 has come, but no chunk: the client has no byte yet."""
    owner = await find_owner(gateway, replicas, "s")
    owner.script.die_after = 0
    reply = await gateway.chat(stream=True, headers={"x-session-affinity": "s"})
    assert (reply.text, reply.frames[-1]) == ("Hello, world", "[DONE]")


async def test_a_replica_that_is_gone_is_replaced_unnoticed(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    owner = await find_owner(gateway, replicas, "s")
    await owner.stop()
    reply = await gateway.chat(stream=True, headers={"x-session-affinity": "s"})
    assert (reply.text, reply.frames[-1]) == ("Hello, world", "[DONE]")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_owner_spills_to_the_next_in_rank(
    gateway: Harness, replicas: list[FakeReplica], status: int
) -> None:
    owner = await find_owner(gateway, replicas, "s")
    owner.script.status = status
    reply = await gateway.chat(headers={"x-session-affinity": "s"})
    assert reply.headers["x-embergate-replica"] == other_of(replicas, owner).id
    owner.script.status = 200
    reply = await gateway.chat(headers={"x-session-affinity": "s"})
    assert reply.headers["x-embergate-replica"] == owner.id, "a full replica is not an unhealthy one"


@pytest.mark.parametrize("path", [CHAT, RUN])
async def test_a_replica_lost_mid_stream_gives_an_error_event_and_no_end(
    gateway: Harness, replicas: list[FakeReplica], path: str
) -> None:
    """BR-75: never a clean short answer; recorded, not charged; not retried; marked unhealthy."""
    for replica in replicas:
        replica.script.die_after = 2
    reply = await gateway.chat(path=path, stream=True)
    assert reply.status == 200
    assert reply.is_cut, "the end must not look clean"
    assert reply.text == "Hello,"
    assert reply.frames[-1]["error"]["code"] == "worker_lost"
    assert "[DONE]" not in reply.frames
    assert not any("usage" in frame and frame["usage"] for frame in reply.frames)
    assert len(replicas[0].requests + replicas[1].requests) == 1
    (record,) = await gateway.stopped_records()
    assert record.status == "replica_lost"
    assert not record.is_charged
    assert record.completion_tokens == 2


async def test_a_stream_that_ends_early_without_done_is_lost_too(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.end_early_after = 2
    reply = await gateway.chat(stream=True)
    assert reply.is_cut
    assert reply.frames[-1]["error"]["code"] == "worker_lost"
    (record,) = await gateway.stopped_records()
    assert record.status == "replica_lost"


async def test_a_stream_without_usage_is_no_complete_answer(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    """Nothing is guessed for an answer that would be billed as complete."""
    for replica in replicas:
        replica.script.drops_usage = True
    reply = await gateway.chat(stream=True)
    assert reply.is_cut
    assert "[DONE]" not in reply.frames


async def test_a_stalled_stream_gives_a_timeout_event(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """BR-77: it must not end cleanly either; the replica is told to stop."""
    for replica in replicas:
        replica.script.stall_after = 2
    started = asyncio.get_running_loop().time()
    reply = await gateway.chat(stream=True)
    assert asyncio.get_running_loop().time() - started < 1.5
    assert reply.is_cut
    assert reply.text == "Hello,"
    assert reply.frames[-1]["error"]["code"] == "timeout"
    assert "[DONE]" not in reply.frames
    (record,) = await gateway.stopped_records()
    assert (record.status, record.completion_tokens, record.is_estimated) == ("timeout", 2, False)
    assert len(replicas[0].disconnects + replicas[1].disconnects) == 1


async def test_an_engine_failure_mid_stream_gives_its_code(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.error_frame_after = 1
    reply = await gateway.chat(stream=True)
    assert reply.is_cut
    assert reply.frames[-1]["error"]["code"] == "engine_error"
    (record,) = await gateway.stopped_records()
    assert record.status == "error"
    assert not record.is_charged


async def test_a_replica_whose_engine_died_is_lost(gateway: Harness, replicas: list[FakeReplica]) -> None:
    for replica in replicas:
        replica.script.error_frame_after = 1
        replica.script.error_code = "engine_died"
    reply = await gateway.chat(stream=True)
    assert reply.is_cut
    assert reply.frames[-1]["error"]["code"] == "worker_lost"
    (record,) = await gateway.stopped_records()
    assert record.status == "replica_lost"
    assert not record.is_charged


async def test_an_engine_failure_before_the_first_chunk_is_replaced_unnoticed(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    owner = await find_owner(gateway, replicas, "s")
    owner.script.error_frame_after = 0
    reply = await gateway.chat(stream=True, headers={"x-session-affinity": "s"})
    assert (reply.text, reply.frames[-1]) == ("Hello, world", "[DONE]")


async def test_a_request_that_makes_engines_fail_takes_replicas_from_nobody(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.status = 500
        replica.script.error = ErrorDetail(message="", type="server_error", code="engine_error")
    assert (await gateway.chat()).status == 503
    assert gateway.gateway is not None
    assert {replica.health for replica in gateway.gateway.table.replicas} == {"ready"}
    for replica in replicas:
        replica.script.status, replica.script.error = 200, None
    assert (await gateway.chat()).status == 200


async def test_a_draining_replica_gets_no_new_requests(gateway: Harness, replicas: list[FakeReplica]) -> None:
    owner = await find_owner(gateway, replicas, "s")
    owner.health = "draining"
    await eventually(lambda: gateway.health_of(owner) == "draining")
    reply = await gateway.chat(headers={"x-session-affinity": "s"})
    assert reply.headers["x-embergate-replica"] == other_of(replicas, owner).id
    owner.health = "ready"
    await eventually(lambda: gateway.health_of(owner) == "ready")
    reply = await gateway.chat(headers={"x-session-affinity": "s"})
    assert reply.headers["x-embergate-replica"] == owner.id


async def test_a_restarted_replica_is_used_again(gateway: Harness, replicas: list[FakeReplica]) -> None:
    owner = await find_owner(gateway, replicas, "s")
    port = owner.port
    await owner.stop()
    await eventually(lambda: gateway.health_of(owner) != "ready")
    await owner.start(port)
    await eventually(lambda: gateway.health_of(owner) == "ready")
    reply = await gateway.chat(headers={"x-session-affinity": "s"})
    assert reply.headers["x-embergate-replica"] == owner.id


async def test_an_only_replica_that_restarts_is_waited_for(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    config = gateway_config()
    gateway = await start_gateway(
        gateway_config(routing=type(config.routing)(capacity_wait_s=3)), replicas=replicas[:1]
    )
    port = replicas[0].port
    await replicas[0].stop()
    waiting = asyncio.create_task(gateway.chat())
    await asyncio.sleep(0.3)
    await replicas[0].start(port)
    assert (await waiting).status == 200


async def leave_after(gateway: Harness, path: str, num_tokens: int, *, stream: bool = True) -> float:
    """Begin an answer and close the connection after ``num_tokens`` chunks with text. Returns when."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "stream": stream}
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session:
        if not stream:
            with pytest.raises(TimeoutError):
                await session.post(
                    gateway.url(path), json=body, headers=headers, timeout=aiohttp.ClientTimeout(total=0.3)
                )
            return asyncio.get_running_loop().time()
        response = await session.post(gateway.url(path), json=body, headers=headers)
        seen = b""
        while seen.count(b'"content":"t') < num_tokens:
            seen += await response.content.readany()
        response.close()
        return asyncio.get_running_loop().time()


@pytest.mark.parametrize("path", [CHAT, RUN])
async def test_a_client_that_leaves_frees_the_replica_and_pays_for_what_was_generated(
    gateway: Harness, replicas: list[FakeReplica], path: str
) -> None:
    """BR-17, complaint E7: upstream closed within 200 ms; one record, with the replica's own counts."""
    for replica in replicas:
        replica.script.tokens = [f"t{index}" for index in range(200)]
        replica.script.token_delay_s = 0.02
    left_at = await leave_after(gateway, path, 5)
    replica = owner_of(replicas)
    await eventually(lambda: bool(replica.disconnects))
    ((request_id, closed_at),) = replica.disconnects
    assert closed_at - left_at < 0.2
    (record,) = await gateway.stopped_records()
    assert record.request_id == request_id
    assert (record.status, record.is_estimated) == ("client_disconnected", False)
    assert record.completion_tokens == replica.usages[0].usage.completion_tokens
    assert 5 <= record.completion_tokens < 20
    assert (record.prompt_tokens, record.cached_prompt_tokens) == (12, 4)
    assert record.is_charged


async def test_a_client_that_leaves_before_the_answer_frees_the_replica_too(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.token_delay_s = 0.2
        replica.script.tokens = ["t"] * 20
    await leave_after(gateway, CHAT, 0, stream=False)
    await eventually(lambda: len(owner_of(replicas).disconnects) == 1)
    (record,) = await gateway.stopped_records()
    assert (record.status, record.is_estimated) == ("client_disconnected", False)
    assert record.completion_tokens == owner_of(replicas).usages[0].usage.completion_tokens


async def test_a_zero_from_the_replica_is_a_value(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """BR-19: not a reason to estimate."""
    for replica in replicas:
        replica.script.prompt_tokens = replica.script.cached_tokens = 0
        replica.script.token_delay_s = 1.0
        replica.script.tokens = ["t"] * 20
    await leave_after(gateway, CHAT, 0, stream=False)
    (record,) = await gateway.stopped_records()
    assert (record.prompt_tokens, record.completion_tokens, record.is_estimated) == (0, 0, False)


async def test_counts_are_estimated_and_marked_only_when_the_replica_has_none(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.forgets_usage = True
        replica.script.tokens = [f"t{index}" for index in range(200)]
        replica.script.token_delay_s = 0.02
    await leave_after(gateway, CHAT, 5)
    (record,) = await gateway.stopped_records()
    assert (record.status, record.is_estimated) == ("client_disconnected", True)
    assert 5 <= record.completion_tokens < 20
    assert record.prompt_tokens > 0


async def test_a_slow_reader_slows_only_itself(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    """A reader that pauses gets everything in the end, and the gateway does not keep it all in memory."""
    gateway = await start_gateway(gateway_config(write_buffer_bytes=16 * 1024), replicas=replicas[:1])
    replicas[0].script.tokens = ["x" * 4000] * 2000
    body = {"model": MODEL, "messages": [{"role": "user", "content": "long"}], "stream": True}
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(read_bufsize=2**14) as session:
        response = await session.post(gateway.url(CHAT), json=body, headers=headers)
        await asyncio.sleep(0.7)  # longer than the idle timeout, which rests while the reader does
        quick = await asyncio.wait_for(gateway.get(gateway.root("/health")), 1)
        assert quick.status == 200
        seen = await response.read()
    assert seen.count(b"x" * 4000) == 2000
    assert seen.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_answers_of_different_clients_do_not_mix(gateway: Harness, replicas: list[FakeReplica]) -> None:
    for replica in replicas:
        replica.script.token_delay_s = 0.001
        replica.script.tokens = [f"t{index}" for index in range(20)]
    replies = await asyncio.gather(*(gateway.chat(stream=True, path=path) for path in [CHAT, RUN] * 20))
    for reply in replies:
        assert reply.text == "".join(f"t{index}" for index in range(20))
        ids = {frame["id"] for frame in reply.frames if isinstance(frame, dict) and "id" in frame}
        assert len(ids) == 1
        assert reply.headers["cf-ai-req-id"] in json.dumps(list(ids))
