"""One durable usage record per served request, before its end is seen, whatever happens."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from billing.posting import Poster
from billing.spool import Spool, SpoolError
from billing.usage import UsageRecord
from gateway.config import MeteringConfig
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import ACCOUNT, MODEL, Harness, gateway_config

RUN = f"/run/{MODEL}"
CHAT = "/v1/chat/completions"
StartGateway = Callable[..., Awaitable[Harness]]


async def test_the_record_says_what_the_client_was_told(gateway: Harness) -> None:
    """Complaint A3, BR-30: the same figures in the answer and in the ledger."""
    reply = await gateway.chat(path=RUN, stream=True, headers={"x-session-affinity": "ses_1"})
    usage = reply.frames[-2]["usage"]
    (record,) = await gateway.stopped_records()
    assert record.account_id == ACCOUNT
    assert record.request_id == reply.headers["cf-ai-req-id"]
    assert (record.model, record.surface, record.session) == (MODEL, "run", "ses_1")
    assert record.replica_id == reply.headers["x-embergate-replica"]
    assert record.prompt_tokens == usage["prompt_tokens"]
    assert record.cached_prompt_tokens == usage["prompt_tokens_details"]["cached_tokens"]
    assert record.completion_tokens == usage["completion_tokens"]
    assert record.status == "ok"
    took_us = record.finished_at_us - record.started_at_us
    assert 0 < record.ttft_us <= took_us


async def test_an_answer_in_one_piece_has_no_time_to_its_first_token(gateway: Harness) -> None:
    await gateway.chat(path=RUN)
    (record,) = await gateway.stopped_records()
    assert (record.completion_tokens > 0, record.ttft_us) == (True, 0)


async def test_records_equal_requests(gateway: Harness) -> None:
    """BR-21: keyed by an id drawn at admission, unique, whatever chunks say."""
    replies = await asyncio.gather(
        *(
            gateway.chat(path=path, stream=stream, stream_options={"include_usage": True})
            for path in (CHAT, RUN)
            for stream in (True, False)
            for _ in range(10)
        )
    )
    ids = [reply.headers["cf-ai-req-id"] for reply in replies]
    records = await gateway.stopped_records()
    assert sorted(record.request_id for record in records) == sorted(set(ids)) == sorted(ids)


class SlowDisk:
    """Stands in for the spool's append: waits for a permission, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.error: Exception | None = None
        self.groups: list[int] = []
        append = Spool.append

        def slow_append(spool: Spool, records: Sequence[UsageRecord]) -> None:
            self.may_write.wait(5)
            if self.error is not None:
                raise self.error
            self.groups.append(len(records))
            append(spool, records)

        monkeypatch.setattr(Spool, "append", slow_append)


@pytest.mark.parametrize("path", [CHAT, RUN])
async def test_the_end_of_a_stream_waits_for_the_disk(
    gateway: Harness, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    disk = SlowDisk(monkeypatch)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    from tests.support.gateway_harness import TOKEN

    headers = {"authorization": f"Bearer {TOKEN}"}
    async with gateway.session.post(gateway.url(path), json=body, headers=headers) as response:
        seen = b""
        while b'"finish_reason":"stop"' not in seen:
            seen += await response.content.readany()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                seen += await response.content.readany()
        assert b"[DONE]" not in seen
        assert b'"prompt_tokens"' not in seen
        disk.may_write.set()
        seen += await response.content.read()
    assert seen.endswith(b"data: [DONE]\n\n")


async def test_the_body_of_an_answer_waits_for_the_disk(
    gateway: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    waiting = asyncio.create_task(gateway.chat())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    disk.may_write.set()
    assert (await waiting).status == 200


@pytest.mark.parametrize("error", [SpoolError("the disk is full"), OSError(28, "No space left on device")])
async def test_a_full_disk_is_never_told_as_done(
    gateway: Harness, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    disk = SlowDisk(monkeypatch)
    disk.error = error
    disk.may_write.set()
    streamed = await gateway.chat(stream=True)
    assert streamed.is_cut
    assert streamed.frames[-1]["error"]["code"] == "metering_unavailable"
    assert "[DONE]" not in streamed.frames
    plain = await gateway.chat()
    assert plain.status == 503
    assert plain.json["errors"][0]["code"] == 7009
    assert plain.headers["retry-after"] == "1"
    ready = await gateway.get(gateway.root("/ready"), token=None)
    assert (ready.status, ready.json["status"]) == (503, "unavailable")
    assert "cannot be written" in ready.json["ledger"]
    disk.error = None
    await asyncio.sleep(1.1)
    assert (await gateway.chat()).status == 200, "it recovers by itself"
    assert (await gateway.get(gateway.root("/ready"), token=None)).status == 200


async def test_nothing_is_computed_while_the_disk_is_known_to_be_full(
    gateway: Harness, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    disk.error = OSError(28, "No space left on device")
    disk.may_write.set()
    replies = [await gateway.chat() for _ in range(10)]
    assert {reply.status for reply in replies} == {503}
    assert sum(len(replica.requests) for replica in replicas) <= 2, "the first, and one that tries again"


async def test_a_disk_that_hangs_ends_the_answer_within_the_commit_timeout(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(
        gateway_config(metering=MeteringConfig(commit_timeout_s=0.2, inline_commit_max_s=0.0))
    )
    disk = SlowDisk(monkeypatch)
    started = time.monotonic()
    reply = await gateway.chat(stream=True)
    assert time.monotonic() - started < 1.5
    assert reply.is_cut
    assert "[DONE]" not in reply.frames
    disk.may_write.set()


async def test_commits_are_grouped(gateway: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends while the disk is busy shares the next flush."""
    disk = SlowDisk(monkeypatch)
    waiting = [asyncio.create_task(gateway.chat()) for _ in range(20)]
    await asyncio.sleep(0.4)
    disk.may_write.set()
    assert {(await reply).status for reply in waiting} == {200}
    assert sum(disk.groups) == 20
    assert len(disk.groups) <= 3


async def test_a_graceful_stop_loses_nothing(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """BR-105, BR-109: requests in flight end inside the grace, and every record is in the ledger."""
    for replica in replicas:
        replica.script.token_delay_s = 0.1
    waiting = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(20)]
    await asyncio.sleep(0.15)
    stopping = asyncio.create_task(_stop_server(gateway))
    replies = await asyncio.gather(*waiting)
    await stopping
    assert {reply.frames[-1] for reply in replies} == {"[DONE]"}
    assert len(await gateway.stopped_records()) == 20


async def test_a_stop_after_the_grace_records_what_it_cut(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    gateway = await start_gateway(gateway_config(shutdown_grace_s=0.2))
    for replica in replicas:
        replica.script.token_delay_s = 0.1
        replica.script.tokens = ["t"] * 100
    waiting = asyncio.create_task(gateway.chat(stream=True))
    await asyncio.sleep(0.3)
    await _stop_server(gateway)
    reply = await waiting
    assert reply.is_cut
    assert "[DONE]" not in reply.frames
    (record,) = await gateway.stopped_records()
    assert record.status in ("client_disconnected", "error")
    assert record.completion_tokens > 0


async def _stop_server(gateway: Harness) -> None:
    """Stop the gateway but keep the client's session open."""
    assert gateway.gateway is not None
    await gateway.gateway.stop()
    gateway.gateway = None


async def test_requests_of_a_killed_gateway_are_recorded_from_the_replicas(
    gateway: Harness, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of this answer was never let out, so its record is written later, and it is not charged."""
    disk = SlowDisk(monkeypatch)  # the record never gets to the disk, as when the process is killed here
    disk.error = OSError("killed")
    disk.may_write.set()
    lost = await gateway.chat(headers={"x-session-affinity": "ses_9"})
    assert lost.status == 503
    await gateway.stop()
    monkeypatch.undo()
    await gateway.start()
    served = await gateway.chat()
    await asyncio.sleep(0.3)
    await gateway.stop()
    await gateway.start()  # once more: it must not be written twice
    await asyncio.sleep(0.3)
    records = await gateway.stopped_records()
    assert [record.status for record in records] == ["error", "ok"]
    recovered = records[0]
    assert recovered.request_id == replicas[0].usages[0].request_id if replicas[0].usages else True
    assert recovered.request_id == lost.headers["cf-ai-req-id"]
    assert (recovered.account_id, recovered.session, recovered.surface) == (ACCOUNT, "ses_9", "v1")
    assert (recovered.prompt_tokens, recovered.cached_prompt_tokens, recovered.completion_tokens) == (
        12,
        4,
        3,
    )
    assert not recovered.is_charged
    assert records[1].request_id == served.headers["cf-ai-req-id"]


async def test_a_replica_that_comes_back_is_reconciled(
    gateway: Harness, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    disk.error = OSError("killed")
    disk.may_write.set()
    assert (await gateway.chat()).status == 503
    await gateway.stop()
    monkeypatch.undo()
    owner = next(replica for replica in replicas if replica.usages)
    port = owner.port
    await owner.stop()
    await gateway.start()
    await owner.start(port)
    await asyncio.sleep(0.4)
    (record,) = await gateway.stopped_records()
    assert record.status == "error"


async def test_foreign_requests_on_a_replica_are_left_alone(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    body: dict[str, Any] = {"request_id": "foreign", "model": MODEL, "messages": [], "stream": False}
    url = f"{replicas[0].url}/v1/chat/completions"
    async with gateway.session.post(url, data=msgspec.json.encode(body)) as response:
        assert response.status == 200
    await gateway.stop()
    await gateway.start()
    await asyncio.sleep(0.2)
    assert await gateway.stopped_records() == []


async def test_a_taken_port_is_an_error_that_leaves_nothing_behind(
    gateway: Harness, prepared_dir: Path, tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    assert gateway.gateway is not None
    config = gateway_config(port=gateway.gateway.server.port)
    other = Harness(Path(shutil.copytree(prepared_dir, tmp_path / "other")), replicas, config)
    num_threads = threading.active_count()
    with pytest.raises(OSError, match="address already in use"):
        await other.start()
    assert not [one for one in threading.enumerate() if one.name == "usage-journal"][1:]
    assert threading.active_count() <= num_threads + 5  # workers of the loop's executor may stay
    other.gateway = None
    assert other.records() == []


async def _leave_during_prefill(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """Ask, and go before the first token."""
    for replica in replicas:
        replica.script.token_delay_s = 30
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await gateway.chat(stream=True)


async def test_who_leaves_during_prefill_is_recorded_with_the_replicas_counts(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    """A step of a long prompt takes seconds on few cores: the abort is confirmed after it."""
    gateway = await start_gateway()
    for replica in replicas:
        replica.script.abort_delay_s = 0.4
    await _leave_during_prefill(gateway, replicas)
    await asyncio.sleep(0.5)
    (record,) = await gateway.stopped_records()
    assert (record.prompt_tokens, record.cached_prompt_tokens, record.completion_tokens) == (12, 4, 0)
    assert (record.status, record.is_estimated) == ("client_disconnected", False)


async def test_an_abort_that_is_not_confirmed_is_looked_up(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    gateway = await start_gateway(gateway_config(metering=MeteringConfig(abort_usage_wait_s=0.1)))
    for replica in replicas:
        replica.script.abort_delay_s = 30
    await _leave_during_prefill(gateway, replicas)
    await asyncio.sleep(0.5)
    (record,) = await gateway.stopped_records()
    assert (record.prompt_tokens, record.cached_prompt_tokens, record.completion_tokens) == (12, 4, 0)
    assert not record.is_estimated


async def test_a_stop_does_not_wait_for_a_replica_that_says_nothing(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    gateway = await start_gateway(gateway_config(metering=MeteringConfig(stop_usage_wait_s=0.2)))
    for replica in replicas:
        replica.script.abort_delay_s = 30
    await _leave_during_prefill(gateway, replicas)
    await asyncio.sleep(0.05)
    started = time.monotonic()
    (record,) = await gateway.stopped_records()
    assert time.monotonic() - started < 4
    assert (record.status, record.is_estimated) == ("client_disconnected", True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_counts_more_cached_than_prompt_tokens_still_gets_a_record(
    gateway: Harness, replicas: list[FakeReplica], stream: bool
) -> None:
    for replica in replicas:
        replica.script.cached_tokens = 13
    reply = await gateway.chat(path=RUN, stream=stream)
    usage = reply.frames[-2]["usage"] if stream else reply.json["result"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 12, "the client is told what is recorded"
    (record,) = await gateway.stopped_records()
    assert (record.prompt_tokens, record.cached_prompt_tokens, record.completion_tokens) == (12, 12, 3)
    assert (record.status, record.is_estimated) == ("ok", True)


async def test_a_session_with_control_characters_is_served_and_recorded_without_them(
    gateway: Harness,
) -> None:
    reply = await gateway.chat(options={"sessionAffinity": "ses\x00_1\n" + "x" * 1000})
    assert reply.status == 200
    (record,) = await gateway.stopped_records()
    assert record.session.startswith("ses_1xxx")
    assert len(record.session) <= 256


async def test_a_gateway_starts_without_its_database_and_says_so(
    data_dir: Path, start_gateway: StartGateway
) -> None:
    path, aside = data_dir / "ledger.db", data_dir / "aside.db"
    path.rename(aside)
    path.mkdir()  # in the way: nothing can be opened there
    gateway = await start_gateway()
    ready = await gateway.get(gateway.root("/ready"), token=None)
    assert (ready.status, ready.json["ledger"]) == (503, "the database does not answer")
    refused = await gateway.chat()
    assert (refused.status, refused.json["errors"][0]["code"]) == (503, 3050)
    assert refused.headers["retry-after"] == "1"
    path.rmdir()
    aside.rename(path)
    for _ in range(200):
        ready = await gateway.get(gateway.root("/ready"), token=None)
        if ready.status == 200:
            break
        await asyncio.sleep(0.05)
    assert (ready.status, ready.json["ledger"]) == (200, "ok")
    assert (await gateway.chat()).status == 200
    (record,) = await gateway.stopped_records()
    assert record.status == "ok"


async def test_readiness_says_that_posting_has_ended(
    gateway: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Poster, "error", property(lambda _: RuntimeError("a fault")))
    ready = await gateway.get(gateway.root("/ready"), token=None)
    assert ready.status == 503
    assert "restart" in ready.json["ledger"]
