"""What becomes of one item: an end, or a wait that counts against it or does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from billing.rates import NO_CHARGE
from gateway.batches.config import BatchesConfig
from gateway.batches.exchange import MemoryExchange
from gateway.batches.forms import ItemForm
from gateway.batches.jobs import Ending, Lease
from gateway.batches.runner import ItemRunner, Postponement, RunningItem, exhausted
from gateway.call import Call
from gateway.config import ReplicaAddress
from gateway.edge.exchange import ResponseStateError
from gateway.errors import Reason, Refusal, bad_input, no_capacity, timed_out, unavailable
from gateway.metrics import GatewayMetrics
from gateway.replicas import Replica
from gateway.telemetry import Telemetry
from tests.support.batches import record_of
from tests.support.ledger import ACCOUNT, KIMI

CONFIG = BatchesConfig(retry_initial_s=1.0, retry_max_s=5.0, max_failures=4)
REPLICA = Replica(ReplicaAddress(id="r", url="http://127.0.0.1:1"))


def lease_of(**changes: object) -> Lease:
    fields: dict[str, object] = {
        "batch_id": "b", "position": 3, "number": 2, "account_id": ACCOUNT, "token_id": "token-1",
        "form": "openai", "endpoint": "/v1/chat/completions", "model": KIMI, "prefix_group": "g",
        "num_failures": 0, "body": b"{}", "reference": b'"ref"', "created_at_us": 1_000_000,
    }  # fmt: skip
    return Lease(**(fields | changes))  # type: ignore[arg-type]


class ScriptedPipeline:
    """Does to each call what a test says."""

    def __init__(self, act: Callable[[Call], None]) -> None:
        self.act = act
        self.calls: list[Call] = []

    async def serve(self, call: Call) -> None:
        self.calls.append(call)
        self.act(call)


async def run(act: Callable[[Call], None], lease: Lease | None = None) -> Ending | Postponement:
    clock = asyncio.get_running_loop().time
    telemetry = Telemetry(GatewayMetrics(10), None, None, clock)
    forms = {"/v1/chat/completions": ItemForm(None)}  # type: ignore[arg-type]
    runner = ItemRunner(ScriptedPipeline(act), forms, telemetry, CONFIG, clock)
    return await runner.run(RunningItem(lease or lease_of(), REPLICA, "batch-g"))


def refuse(refusal: Refusal, num_attempts: int = 1) -> Callable[[Call], None]:
    def act(call: Call) -> None:
        call.num_attempts = num_attempts
        raise refusal

    return act


async def test_an_answer_ends_the_item_with_its_record() -> None:
    lease = lease_of()

    def act(call: Call) -> None:
        assert call.request_id == lease.request_id
        assert call.exchange.headers["x-session-affinity"] == "batch-g"
        call.record, call.charge = record_of(lease), NO_CHARGE
        call.http_status = 200
        call.exchange.respond(200, (), b'{"choices":[]}')

    ending = await run(act, lease)
    assert isinstance(ending, Ending)
    assert ending.is_success
    assert ending.record is not None
    assert json.loads(ending.output) == {
        "id": "batch_req_b_3",
        "custom_id": "ref",
        "response": {"status_code": 200, "request_id": lease.request_id, "body": {"choices": []}},
        "error": None,
    }


@pytest.mark.parametrize(
    "refusal", [no_capacity(), Refusal(Reason.RATE, "x"), Refusal(Reason.DAILY_NEURONS, "x"), unavailable()]
)
async def test_what_is_nobodys_fault_is_a_wait(refusal: Refusal) -> None:
    outcome = await run(refuse(refusal, num_attempts=0))
    assert isinstance(outcome, Postponement)
    assert not outcome.has_failed
    assert outcome.is_busy is (refusal.reason is Reason.CAPACITY)


async def test_one_whose_client_left_waits_for_its_next_turn() -> None:
    def act(call: Call) -> None:
        assert isinstance(call.exchange, MemoryExchange)
        call.exchange.leave()

    assert await run(act) == Postponement(0.0)


@pytest.mark.parametrize(("num_failures", "delay_s"), [(0, 1.0), (1, 2.0), (2, 4.0)])
@pytest.mark.parametrize("refusal", [unavailable(), timed_out()])
async def test_failures_are_tried_again_ever_later(
    refusal: Refusal, num_failures: int, delay_s: float
) -> None:
    outcome = await run(refuse(refusal), lease_of(num_failures=num_failures))
    assert outcome == Postponement(delay_s, has_failed=True)


async def test_enough_failures_are_the_end() -> None:
    ending = await run(refuse(unavailable()), lease_of(num_failures=3))
    assert isinstance(ending, Ending)
    assert not ending.is_success
    assert json.loads(ending.output)["response"]["status_code"] == 503


async def test_a_refused_request_has_failed_for_good() -> None:
    ending = await run(refuse(bad_input("/temperature", "is too high"), num_attempts=0))
    assert isinstance(ending, Ending)
    assert ending.record is None
    response = json.loads(ending.output)["response"]
    assert response["status_code"] == 400
    assert response["body"]["error"]["param"] == "temperature"


async def test_a_fault_of_ours_is_a_failed_attempt() -> None:
    def act(call: Call) -> None:
        raise RuntimeError("a bug")

    assert await run(act) == Postponement(1.0, has_failed=True)


async def test_an_endpoint_that_is_gone_fails_the_item() -> None:
    ending = await run(lambda call: None, lease_of(endpoint="/v1/gone"))
    assert isinstance(ending, Ending)
    assert not ending.is_success


def test_an_item_that_kills_whoever_runs_it_ends() -> None:
    ending = exhausted(lease_of(form="native", num_failures=4))
    item = json.loads(ending.output)
    assert (item["id"], item["success"], item["external_reference"]) == (3, False, "ref")
    assert "4 attempts" in item["error"]


class TestMemoryExchange:
    def test_it_answers_once(self) -> None:
        exchange = MemoryExchange(b"", {})
        exchange.respond(200, (), b"answer")
        with pytest.raises(ResponseStateError):
            exchange.respond(200, (), b"another")
        exchange.leave()
        assert (exchange.is_disconnected, exchange.answer) == (False, b"answer")

    def test_one_who_left_gets_nothing(self) -> None:
        exchange = MemoryExchange(b"", {})
        calls: list[int] = []
        exchange.on_disconnect(lambda: calls.append(1))
        exchange.leave()
        exchange.leave()
        exchange.on_disconnect(lambda: calls.append(2))
        exchange.respond(200, (), b"answer")
        assert (calls, exchange.status, exchange.is_started) == ([1, 2], 0, False)

    def test_nothing_is_streamed(self) -> None:
        exchange = MemoryExchange(b"", {})
        for stream in (lambda: exchange.start_stream(200, ()), lambda: exchange.write(b"x"), exchange.finish):
            with pytest.raises(ResponseStateError):
                stream()
