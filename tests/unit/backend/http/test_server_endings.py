"""However a request ends: its sequences stop, and one recent usage says how far it got."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import msgspec
import pytest

from backend.server import ReplicaStartError
from tests.support.scripted_replica import Replica, StartReplica
from tests.support.waiting import eventually

LONG = "abcdefghij" * 9


async def read_some(replica: Replica, num_chunks: int, **fields: object) -> None:
    """Read the beginning of a stream and leave."""
    async with replica.session.post(
        "/v1/chat/completions", json=replica.request(stream=True, **fields)
    ) as response:
        assert response.status == 200
        for _ in range(num_chunks):
            await response.content.readuntil(b"\n\n")
        response.close()


class TestReadersThatLeave:
    async def test_the_sequence_is_freed_and_what_was_generated_is_recorded(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.01, cached_prompt_tokens=16)
        await read_some(replica, 5, request_id="left")
        left_at = asyncio.get_running_loop().time()
        await eventually(lambda: replica.engine.num_open == 0)
        assert replica.engine.aborted_at[0] - left_at < 0.2
        usages = await self._usages(replica)
        assert len(usages) == 1
        assert usages[0]["request_id"] == "left"
        assert usages[0]["finish_reason"] == "abort"
        usage = usages[0]["usage"]
        assert usage["prompt_tokens"] == len(replica.engine.requests[0].prompt_token_ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16
        assert 4 <= usage["completion_tokens"] <= 40

    async def test_a_whole_answer_is_stopped_too(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.01)
        task = asyncio.create_task(replica.complete())
        await underway(replica)
        task.cancel()
        await eventually(lambda: replica.engine.num_open == 0)
        assert [u["finish_reason"] for u in await self._usages(replica)] == ["abort"]

    async def test_all_choices_are_stopped(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.01)
        await read_some(replica, 12, n=3)
        await eventually(lambda: replica.engine.num_open == 0)
        assert sorted(replica.engine.aborted) == [1, 2, 3]
        usages = await self._usages(replica)
        assert len(usages) == 1
        assert usages[0]["usage"]["completion_tokens"] >= 9

    async def test_one_that_leaves_before_its_first_step_owes_nothing(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=30)
        task = asyncio.create_task(replica.complete(stream=True))
        await eventually(lambda: replica.engine.num_open == 1)
        task.cancel()
        await eventually(lambda: replica.engine.num_open == 0)
        usages = await self._usages(replica)
        assert usages[0]["finish_reason"] == "abort"
        assert usages[0]["usage"]["total_tokens"] == 0

    async def test_others_go_on(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.005)
        other = asyncio.create_task(replica.complete(stream=True))
        await read_some(replica, 3)
        assert (await other).text() == LONG

    async def _usages(self, replica: Replica) -> list[dict[str, Any]]:
        return await usages_once(replica, 1)


class TestAborts:
    async def test_the_stream_ends_with_its_reason_and_its_usage(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.01)
        running = asyncio.create_task(replica.complete(stream=True, request_id="x"))
        await underway(replica)
        aborted = (await replica.call("POST", "/abort", json={"request_id": "x"})).json
        answer = await running
        assert answer.chunks[-2]["choices"][0]["finish_reason"] == "abort"
        assert answer.frames[-1] == b"[DONE]"
        assert answer.chunks[-1]["usage"] == aborted["usage"]["usage"]
        assert aborted["usage"]["finish_reason"] == "abort"
        assert LONG.startswith(answer.text())
        assert len(await replica.usages()) == 1

    async def test_aborting_again_or_after_the_end_changes_nothing(self, replica: Replica) -> None:
        replica.say("abc")
        await replica.complete(request_id="x")
        for _ in range(2):
            result = (await replica.call("POST", "/abort", json={"request_id": "x"})).json
            assert result["usage"]["finish_reason"] == "stop"
        assert len(await replica.usages()) == 1

    async def test_an_unknown_request_has_no_usage(self, replica: Replica) -> None:
        answer = await replica.call("POST", "/abort", json={"request_id": "never"})
        assert (answer.status, answer.json) == (200, {"request_id": "never", "usage": None})

    async def test_a_waiting_request_can_be_aborted(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=30)
        running = asyncio.create_task(replica.complete(request_id="x"))
        await eventually(lambda: replica.engine.num_open == 1)
        result = (await replica.call("POST", "/abort", json={"request_id": "x"})).json
        assert result["usage"]["usage"]["total_tokens"] == 0
        assert (await running).json["choices"][0] == {
            "index": 0,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": "abort",
        }

    async def test_choices_are_aborted_together(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.01)
        running = asyncio.create_task(replica.complete(request_id="x", n=3))
        await underway(replica)
        await replica.call("POST", "/abort", json={"request_id": "x"})
        answer = (await running).json
        assert [c["finish_reason"] for c in answer["choices"]] == ["abort"] * 3
        assert answer["usage"]["completion_tokens"] > 6


class TestEngineDeath:
    async def test_a_stream_ends_with_an_error_and_without_an_end(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.01)
        running = asyncio.create_task(replica.complete(stream=True))
        await underway(replica)
        replica.engine.die()
        answer = await running
        assert answer.status == 200
        assert answer.chunks[-1]["error"]["code"] == "engine_died"
        assert b"[DONE]" not in answer.body
        assert b'"choices":[]' not in answer.body
        assert [u["finish_reason"] for u in await replica.usages()] == ["error"]

    async def test_a_whole_answer_is_a_500(self, replica: Replica) -> None:
        replica.say(LONG, delay_s=0.01)
        running = asyncio.create_task(replica.complete())
        await underway(replica)
        replica.engine.die()
        answer = await running
        assert (answer.status, answer.json["error"]["code"]) == (500, "engine_died")
        late = await replica.complete()
        assert (late.status, late.json["error"]["code"]) == (500, "engine_died")

    async def test_the_server_ends_with_an_exit_code_and_its_readers_are_told(
        self, start_replica: StartReplica
    ) -> None:
        replica = await start_replica(loads=False)
        exit_code = asyncio.create_task(replica.server.serve())
        replica.say(LONG, delay_s=0.01)
        await eventually_ready(replica)
        running = asyncio.create_task(replica.complete(stream=True))
        await underway(replica)
        replica.engine.die()
        assert (await running).chunks[-1]["error"]["code"] == "engine_died"
        assert await exit_code == 1


class TestStopping:
    async def test_requests_finish_within_the_grace_and_the_exit_code_is_zero(
        self, start_replica: StartReplica
    ) -> None:
        replica = await start_replica(loads=False)
        exit_code = asyncio.create_task(replica.server.serve())
        replica.say("abcdefghij", delay_s=0.03)
        await eventually_ready(replica)
        running = asyncio.create_task(replica.complete(stream=True))
        await underway(replica)
        replica.server.request_stop()
        health = await replica.call("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "draining")
        assert (await replica.complete()).status == 503
        assert (await running).text() == "abcdefghij"
        assert await exit_code == 0
        assert replica.engine.is_closed

    async def test_after_the_grace_the_rest_is_stopped(self, start_replica: StartReplica) -> None:
        replica = await start_replica(loads=False, shutdown_grace_s=0.1)
        exit_code = asyncio.create_task(replica.server.serve())
        replica.say(LONG, delay_s=0.2)
        await eventually_ready(replica)
        running = asyncio.create_task(replica.complete(stream=True))
        await underway(replica)
        began = time.monotonic()
        replica.server.request_stop()
        assert await exit_code == 0
        assert time.monotonic() - began < 5
        assert replica.engine.aborted == [1]
        with pytest.raises(aiohttp.ClientPayloadError):  # cut off, so nobody takes it for a whole answer
            await running

    async def test_a_stop_while_the_model_loads_ends_at_once(self, start_replica: StartReplica) -> None:
        replica = await start_replica(loads=False, engine_start_s=30.0)
        exit_code = asyncio.create_task(replica.server.serve())
        await asyncio.sleep(0.05)
        replica.server.request_stop()
        async with asyncio.timeout(1):
            assert await exit_code == 0


class TestSlowReaders:
    async def test_one_that_takes_nothing_is_given_up_and_others_are_not_held_up(
        self, start_replica: StartReplica
    ) -> None:
        replica = await start_replica(max_write_stall_s=0.3)
        # More than any socket buffer holds, so that the writer has to wait.
        replica.engine.info = msgspec.structs.replace(replica.engine.info, max_model_len=10**7)
        replica.say("x" * 60_000)
        body = json.dumps(
            replica.request(stream=True, max_tokens=None, logprobs=True, top_logprobs=2)
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", replica.server.port, limit=1024)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: len(replica.engine.requests) == 1)
        began = time.monotonic()
        answer = await replica.complete(stream=True, max_tokens=5)
        assert answer.text() == "xxxxx"
        assert time.monotonic() - began < 1
        usages = await usages_once(replica, 2)
        assert [u["finish_reason"] for u in usages] == ["length", "abort"]
        assert usages[1]["usage"]["completion_tokens"] > 5
        writer.close()


async def underway(replica: Replica) -> None:
    """The engine has the request, and has had the time to say some of the answer."""
    await eventually(lambda: replica.engine.num_open > 0)
    await asyncio.sleep(0.1)


async def usages_once(replica: Replica, count: int) -> list[dict[str, Any]]:
    """The recent usages, once there are so many."""
    async with asyncio.timeout(10):
        while len(usages := await replica.usages()) < count:  # noqa: ASYNC110 (state of the server)
            await asyncio.sleep(0.01)
    return usages


async def eventually_ready(replica: Replica) -> None:
    async with asyncio.timeout(5):
        while (await replica.call("GET", "/health")).status != 200:  # noqa: ASYNC110 (state of the server)
            await asyncio.sleep(0.01)


async def test_a_taken_port_is_one_sentence(start_replica: StartReplica, replica: Replica) -> None:
    with pytest.raises(
        ReplicaStartError, match=f"cannot listen on 127.0.0.1:{replica.server.port}: .*in use"
    ):
        await start_replica(port=replica.server.port, loads=False)
