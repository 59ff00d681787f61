"""Replicas that announce themselves: what is believed, and for how long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backend.wire import Registration, sign_registration
from gateway.config import HealthConfig, RegistrationConfig, ReplicaAddress, RoutingConfig
from gateway.errors import Reason, Refusal
from gateway.registrations import Registrations
from gateway.replicas import ReplicaTable
from gateway.routing import RendezvousRanking

TOKEN = "pool-token"
MODEL = "@cf/test/model"
START = 1_800_000_000.0


class Pool:
    """Registrations with clocks that stand still until they are moved."""

    def __init__(self, **config: Any) -> None:
        self.now = START
        configured = [ReplicaAddress(id="configured", url="http://127.0.0.1:1")]
        self.table = ReplicaTable(configured, RoutingConfig(), HealthConfig())
        self.registrations = Registrations(
            self.table,
            RegistrationConfig(is_enabled=True, **config),
            TOKEN,
            [MODEL, "@cf/test/other"],
            clock=lambda: self.now - START,
            wall_clock=lambda: self.now,
        )

    def hear(self, replica_id: str = "r0", *, token: str = TOKEN, **changes: Any) -> None:
        said = Registration(
            replica_id=replica_id, url=f"http://{replica_id}:8801", models=[MODEL], weight=1.0,
            instance="first", sent_at=self.now, lease_s=10.0,
        )  # fmt: skip
        body = msgspec.json.encode(msgspec.structs.replace(said, **changes))
        self.registrations.hear(body, sign_registration(body, token))

    def refused(self, *arguments: Any, **changes: Any) -> Refusal:
        before = self.ids
        with pytest.raises(Refusal) as caught:
            self.hear(*arguments, **changes)
        assert self.ids == before
        return caught.value

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.registrations.sweep()

    @property
    def ids(self) -> list[str]:
        return [replica.id for replica in self.table.replicas]


def test_a_replica_joins_keeps_its_lease_and_leaves_when_it_is_no_longer_heard() -> None:
    pool = Pool()
    pool.hear(weight=2.0)
    assert pool.ids == ["configured", "r0"]
    replica = pool.table.replicas[1]
    assert (replica.address.url, replica.weight, replica.health) == ("http://r0:8801", 2.0, "starting")
    assert replica in pool.table.serving(MODEL)
    assert replica not in pool.table.serving("@cf/test/other")
    for _ in range(5):
        pool.pass_time(8)
        pool.hear(weight=2.0)
    assert pool.table.replicas[1] is replica
    pool.pass_time(9.9)
    assert pool.ids == ["configured", "r0"]
    pool.pass_time(0.2)
    assert pool.ids == ["configured"]
    assert replica.health == "down"
    assert replica not in pool.table.serving(MODEL)


def test_goodbyes_end_a_lease_at_once_and_what_was_said_before_them_comes_too_late() -> None:
    pool = Pool()
    pool.hear()
    pool.now += 1
    pool.hear(is_leaving=True)
    assert pool.ids == ["configured"]
    pool.hear(sent_at=pool.now - 0.5)
    assert pool.ids == ["configured"]
    pool.hear(is_leaving=True, sent_at=pool.now + 0.1)
    pool.now += 1
    pool.hear(instance="second")
    assert pool.ids == ["configured", "r0"]
    pool.now += 1
    pool.hear(is_leaving=True)  # of the first, which is no more
    assert pool.ids == ["configured", "r0"]


def test_a_recorded_message_is_worth_nothing() -> None:
    pool = Pool(max_clock_skew_s=30.0)
    pool.hear(sent_at=pool.now)
    recorded = pool.now
    pool.pass_time(11)
    assert pool.ids == ["configured"]
    pool.hear(sent_at=recorded + 1)
    pool.now += 1
    pool.hear(is_leaving=True)
    pool.hear(sent_at=recorded + 1)
    assert pool.ids == ["configured"]
    pool.pass_time(60)
    assert "synchronise the clocks" in pool.refused(sent_at=recorded + 1).message


def test_a_restarted_replica_takes_its_own_place_and_begins_as_starting() -> None:
    pool = Pool()
    pool.hear()
    first = pool.table.replicas[1]
    pool.table.report_answer(first, "ready")
    pool.now += 1
    pool.hear(instance="second")
    second = pool.table.replicas[1]
    assert pool.ids == ["configured", "r0"]
    assert second is not first
    assert (first.health, second.health) == ("down", "starting")


def test_a_name_that_a_living_replica_has_is_not_given_twice() -> None:
    pool = Pool()
    pool.hear()
    pool.table.report_answer(pool.table.replicas[1], "ready")
    pool.now += 1
    refusal = pool.refused(instance="another", url="http://elsewhere:8801")
    assert refusal.message == "Bad input: '/replica_id': is in use by the replica at http://r0:8801"
    pool.table.report_failure(pool.table.replicas[1], is_certain=True)
    pool.hear(instance="another", url="http://elsewhere:8801")
    assert pool.table.replicas[1].address.url == "http://elsewhere:8801"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replica_id": ""}, "'/replica_id': must have 1 to 200 characters"),
        ({"replica_id": "configured"}, "'/replica_id': is a replica of this gateway's own configuration"),
        ({"url": "r0:8801"}, "'/url': must be http://HOST:PORT or https://HOST:PORT"),
        ({"url": "file:///etc/passwd"}, "'/url': must be http"),
        ({"url": "http://r0:99999"}, "'/url': must be http"),
        ({"url": "http://r0:8801/path"}, "'/url': must be http"),
        ({"url": "http://user@r0:8801"}, "'/url': must be http"),
        ({"weight": 0.0}, "'/weight': must be greater than 0"),
        ({"weight": -1.0}, "'/weight': must be greater than 0"),
        ({"lease_s": 0.0}, "'/lease_s': must be greater than 0 and at most 300.0"),
        ({"lease_s": 301.0}, "'/lease_s': must be greater than 0 and at most 300.0"),
        ({"models": []}, "'/models': none of them is in this gateway's catalog"),
        ({"models": ["unknown"]}, "'/models': none of them is in this gateway's catalog"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    refusal = Pool().refused(**changes)
    assert refusal.reason is Reason.BAD_INPUT
    assert message in refusal.message


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"replica_id": 7}', b"\xff"])
def test_a_signed_message_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        Pool().registrations.hear(body, sign_registration(body, TOKEN))
    assert caught.value.reason is Reason.BAD_INPUT


@pytest.mark.parametrize("signature", ["", "0" * 64, "é"])
def test_only_this_installation_is_believed(signature: str) -> None:
    pool = Pool()
    assert pool.refused(token="another").reason is Reason.AUTHENTICATION
    with pytest.raises(Refusal, match="pool_token"):
        pool.registrations.hear(b"{}", signature)


def test_there_are_no_more_than_configured() -> None:
    pool = Pool(max_replicas=2)
    pool.hear("r0")
    pool.hear("r1")
    assert pool.refused("r2").reason is Reason.CAPACITY
    pool.now += 1
    pool.hear("r0", weight=3.0)
    assert pool.ids == ["configured", "r1", "r0"]


def test_only_the_sessions_that_must_move_do() -> None:
    pool, rank = Pool(), RendezvousRanking()
    for name in ("r0", "r1"):
        pool.hear(name)
    keys = [f"session-{number}" for number in range(3000)]

    def owners() -> dict[str, str]:
        return {key: rank("a" * 32, key, pool.table.serving(MODEL))[0].id for key in keys}

    before = owners()
    pool.hear("r2")
    with_another = owners()
    moved = {key for key in keys if with_another[key] != before[key]}
    assert {with_another[key] for key in moved} == {"r2"}
    assert 0.2 < len(moved) / len(keys) < 0.3
    pool.now += 1
    pool.hear("r2", is_leaving=True)
    assert owners() == before
