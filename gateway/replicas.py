"""The replicas that the edge can route to: health, draining, requests in flight, and waiting for room.

Those of the configuration are there for good; others come and go (:mod:`gateway.registrations`). A replica
starts as ``starting`` and becomes ``ready`` when it says so itself. It is ``down`` after
``failures_to_down`` failures in a row, counting probes and requests alike, or at once when it breaks off an
answer. All state belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from backend.wire import Health, Role
from gateway.config import HealthConfig, ReplicaAddress, RoutingConfig
from gateway.errors import no_capacity, unavailable

HealthState = Literal["starting", "ready", "draining", "down"]


class Replica:
    """One replica as this gateway process sees it.

    Attributes:
        address: where it is, and what it weighs and serves.
        health: only ``ready`` replicas get new requests.
        num_in_flight: requests of this process that it is working on.
        num_failures: failures in a row.
        role, transfer, can_fetch, kv_room_tokens: what it last said (:class:`backend.wire.Health`).
        num_prefills: prompts of this process that it computes for others.
    """

    __slots__ = (
        "address",
        "can_fetch",
        "health",
        "id",
        "kv_room_tokens",
        "num_failures",
        "num_in_flight",
        "num_prefills",
        "role",
        "transfer",
        "weight",
    )

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self.id = address.id
        self.weight = address.weight
        self.health: HealthState = "starting"
        self.num_in_flight = 0
        self.num_failures = 0
        self.role: Role = "both"
        self.transfer = ""
        self.can_fetch = False
        self.kv_room_tokens = -1
        self.num_prefills = 0

    def note(self, said: Health) -> None:
        """Take in what it says about itself."""
        self.role, self.transfer, self.can_fetch = said.role, said.transfer, said.can_fetch
        self.kv_room_tokens = said.kv_room_tokens

    def serves(self, model: str) -> bool:
        """An address that lists no models serves all of them."""
        return not self.address.models or model in self.address.models


class _Waiter:
    """A request that waits for room on one of the replicas of its ranking."""

    __slots__ = ("excluded", "ranking", "turn")

    def __init__(self, ranking: Sequence[Replica], excluded: Collection[Replica]) -> None:
        self.ranking = ranking
        self.excluded = excluded
        self.turn: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()


class ReplicaTable:
    """All replicas, and the queue of requests that wait for one of them to have room."""

    def __init__(
        self, addresses: Sequence[ReplicaAddress], routing: RoutingConfig, health: HealthConfig
    ) -> None:
        self.replicas = tuple(Replica(address) for address in addresses)
        self._routing = routing
        self._failures_to_down = health.failures_to_down
        self._by_model: dict[str, tuple[Replica, ...]] = {}
        self._waiting: deque[_Waiter] = deque()
        self._on_ready: list[Callable[[Replica], None]] = []
        self._on_added: list[Callable[[Replica], None]] = []

    def serving(self, model: str) -> tuple[Replica, ...]:
        """The replicas of ``model``, whatever their health, in the order in which they came."""
        serving = self._by_model.get(model)
        if serving is None:
            serving = tuple(replica for replica in self.replicas if replica.serves(model))
            self._by_model[model] = serving
        return serving

    @property
    def num_ready(self) -> int:
        return sum(replica.health == "ready" for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def on_ready(self, callback: Callable[[Replica], None]) -> None:
        """Call ``callback`` each time a replica becomes ready."""
        self._on_ready.append(callback)

    # -- coming and going ----------------------------------------------------------------------------------

    def on_added(self, callback: Callable[[Replica], None]) -> None:
        """Call ``callback`` each time a replica is added."""
        self._on_added.append(callback)

    def add(self, address: ReplicaAddress) -> Replica:
        """A replica joins; it gets requests when it is found to be ready."""
        replica = Replica(address)
        self._replace((*self.replicas, replica))
        for callback in self._on_added:
            callback(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """A replica leaves: its keys go to the next in rank. Its requests in flight may still end well."""
        self._replace(tuple(each for each in self.replicas if each is not replica))
        replica.health = "down"

    def _replace(self, replicas: tuple[Replica, ...]) -> None:
        self.replicas = replicas
        self._by_model.clear()

    # -- taking a place ------------------------------------------------------------------------------------

    async def take(
        self, ranking: Sequence[Replica], excluded: Collection[Replica], *, rejects_if_busy: bool
    ) -> Replica:
        """Take a place on the first ready replica in rank that has room; give it back with :meth:`put_back`.

        When none has room the request waits for its turn, in order of arrival, for at most
        ``capacity_wait_s``.

        Raises:
            Refusal: no place was to be had: 429 when some replica is ready but full, 503 when none is ready.
        """
        replica = self.take_at_once(ranking, excluded, rejects_if_busy=rejects_if_busy)
        if replica is not None:
            return replica
        can_wait = not rejects_if_busy and any(each not in excluded for each in ranking)
        if can_wait and len(self._waiting) < self._routing.max_waiting:
            replica = await self._wait_for_turn(_Waiter(ranking, excluded))
        if replica is None:
            raise no_capacity() if any(each.health == "ready" for each in ranking) else unavailable()
        return replica

    def take_at_once(
        self, ranking: Sequence[Replica], excluded: Collection[Replica], *, rejects_if_busy: bool
    ) -> Replica | None:
        """:meth:`take` as far as nobody has to wait for it; None when somebody has to."""
        if self._waiting and not rejects_if_busy:
            return None
        replica = self._first_with_room(ranking, excluded)
        if replica is not None:
            replica.num_in_flight += 1
        return replica

    def put_back(self, replica: Replica) -> None:
        """A request on ``replica`` ended; its place goes to the first that waits for it."""
        replica.num_in_flight -= 1
        if self._waiting:
            self._serve_waiting()

    def _first_with_room(self, ranking: Sequence[Replica], excluded: Collection[Replica]) -> Replica | None:
        max_in_flight = self._routing.max_in_flight
        for replica in ranking:
            if (
                replica.health == "ready"
                and replica.num_in_flight < max_in_flight
                and replica not in excluded
            ):
                return replica
        return None

    async def _wait_for_turn(self, waiter: _Waiter) -> Replica | None:
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._routing.capacity_wait_s):
                return await waiter.turn
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.put_back(waiter.turn.result())
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _serve_waiting(self) -> None:
        """Hand out room in order of arrival; who waits for another replica does not hold up the rest."""
        if not self._waiting:
            return
        for waiter in list(self._waiting):
            replica = self._first_with_room(waiter.ranking, waiter.excluded)
            if replica is not None and not waiter.turn.done():
                self._waiting.remove(waiter)
                replica.num_in_flight += 1
                waiter.turn.set_result(replica)

    # -- health --------------------------------------------------------------------------------------------

    def report_answer(self, replica: Replica, health: HealthState) -> None:
        """A probe was answered, with this state."""
        replica.num_failures = 0
        was_ready = replica.health == "ready"
        replica.health = health
        if health == "ready" and not was_ready:
            self._serve_waiting()
            for callback in self._on_ready:
                callback(replica)

    def report_failure(self, replica: Replica, *, is_certain: bool = False) -> None:
        """A probe or a request failed. ``is_certain``: it broke off an answer, so it is down without a
        second try.
        """
        replica.num_failures += 1
        if is_certain or replica.num_failures >= self._failures_to_down:
            replica.health = "down"
