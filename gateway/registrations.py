"""Replicas that are not in the configuration: they say where they are, again and again, and keep a lease.

A message is signed with the pool token (:func:`backend.wire.sign_registration`), so only replicas of this
installation are believed, and carries its time, so that a recorded one is worth nothing later. What a message
says is what the table then has: a replica that changes its address, weight or models leaves and joins in one
step. When nothing is heard of one for the length of its lease it leaves, and its sessions go to the next in
rank; until then its health decides, as with any other.

All state belongs to one event loop and is lost with the process: replicas are heard again within their
interval. Every gateway hears them for itself, so all rank alike.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import msgspec

from backend.wire import Registration, sign_registration
from gateway.config import RegistrationConfig, ReplicaAddress
from gateway.errors import Reason, Refusal, bad_input
from gateway.replicas import Replica, ReplicaTable

MAX_REGISTRATION_BYTES = 64 * 1024
_MAX_NAME = 200
_MAX_WEIGHT = 1e9
_SWEEP_INTERVAL_S = 0.5
_log = logging.getLogger(__name__)


class _Lease:
    __slots__ = ("expires_at", "instance", "replica", "sent_at")

    def __init__(self, replica: Replica, said: Registration, expires_at: float) -> None:
        self.replica = replica
        self.instance = said.instance
        self.sent_at = said.sent_at
        self.expires_at = expires_at


class Registrations:
    """See the module.

    Args:
        models: ids of the catalog; what a replica serves beyond them is of no use here.
        clock: monotonic seconds.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        table: ReplicaTable,
        config: RegistrationConfig,
        pool_token: str,
        models: Collection[str],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._config = config
        self._pool_token = pool_token
        self._models = frozenset(models)
        self._clock = clock
        self._wall_clock = wall_clock
        self._configured = frozenset(replica.id for replica in table.replicas)
        self._leases: dict[str, _Lease] = {}
        self._left: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._keep_sweeping())

    async def stop(self) -> None:
        """Hear nobody any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    def hear(self, body: bytes, signature: str) -> None:
        """A message came in. The same message again changes nothing.

        Raises:
            Refusal: it is not signed with this installation's pool token, not of now, or names a field that
                cannot be.
        """
        said = self._verified(body, signature)
        lease = self._leases.get(said.replica_id)
        if said.sent_at <= max(lease.sent_at if lease else 0.0, self._left.get(said.replica_id, 0.0)):
            return  # overtaken on its way, or played back
        if said.is_leaving:
            self._let_go(said, lease)
        else:
            self._keep(said, lease)

    def sweep(self) -> None:
        """Let go of those that were not heard for the length of their lease."""
        now, wall = self._clock(), self._wall_clock()
        for replica_id, lease in list(self._leases.items()):
            if lease.expires_at <= now:
                _log.warning("replica %s: its lease ran out", replica_id)
                self._drop(replica_id, lease)
        horizon = wall - 2 * self._config.max_clock_skew_s
        self._left = {name: sent_at for name, sent_at in self._left.items() if sent_at > horizon}

    # -- what a message must be ----------------------------------------------------------------------------

    def _verified(self, body: bytes, signature: str) -> Registration:
        expected = sign_registration(body, self._pool_token)
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
            raise Refusal(
                Reason.AUTHENTICATION, "the signature is not that of this installation's secrets/pool_token"
            )
        try:
            said = msgspec.json.decode(body, type=Registration)
        except msgspec.DecodeError as error:
            raise Refusal(Reason.BAD_INPUT, f"Bad input: {error}") from None
        skew_s = said.sent_at - self._wall_clock()
        if not abs(skew_s) <= self._config.max_clock_skew_s:
            raise Refusal(
                Reason.AUTHENTICATION,
                f"the message is {skew_s:+.0f} s from this gateway's clock: synchronise the clocks",
            )
        self._check(said)
        return said

    def _check(self, said: Registration) -> None:
        if not 0 < len(said.replica_id) <= _MAX_NAME:
            raise bad_input("/replica_id", f"must have 1 to {_MAX_NAME} characters")
        if said.replica_id in self._configured:
            raise bad_input("/replica_id", "is a replica of this gateway's own configuration")
        if not _is_base_url(said.url):
            raise bad_input("/url", "must be http://HOST:PORT or https://HOST:PORT")
        if not (math.isfinite(said.weight) and 0 < said.weight <= _MAX_WEIGHT):
            raise bad_input("/weight", f"must be greater than 0 and at most {_MAX_WEIGHT:.0f}")
        if not 0 < said.lease_s <= self._config.max_lease_s:
            raise bad_input("/lease_s", f"must be greater than 0 and at most {self._config.max_lease_s}")
        if not self._models.intersection(said.models):
            raise bad_input("/models", "none of them is in this gateway's catalog")

    # -- coming and going ----------------------------------------------------------------------------------

    def _keep(self, said: Registration, lease: _Lease | None) -> None:
        address = ReplicaAddress(
            id=said.replica_id,
            url=said.url.rstrip("/"),
            weight=said.weight,
            models=sorted(self._models.intersection(said.models)),
        )
        if lease is not None:
            if lease.replica.address == address and lease.instance == said.instance:
                lease.sent_at = said.sent_at
                lease.expires_at = self._clock() + said.lease_s
                return
            self._check_not_taken(said, lease)
            self._drop(said.replica_id, lease)
        elif len(self._leases) >= self._config.max_replicas:
            raise Refusal(
                Reason.CAPACITY, "gateway.registration.max_replicas are registered", retry_after_s=10
            )
        replica = self._table.add(address)
        self._leases[said.replica_id] = _Lease(replica, said, self._clock() + said.lease_s)
        _log.info("replica %s joins at %s", address.id, address.url)

    def _check_not_taken(self, said: Registration, lease: _Lease) -> None:
        """Two replicas of one name would take each other's place again and again."""
        is_another = lease.instance != said.instance and lease.replica.address.url != said.url.rstrip("/")
        if is_another and lease.replica.health in ("ready", "draining"):
            raise bad_input("/replica_id", f"is in use by the replica at {lease.replica.address.url}")

    def _let_go(self, said: Registration, lease: _Lease | None) -> None:
        if lease is None or lease.instance != said.instance:
            return
        self._left[said.replica_id] = said.sent_at
        _log.info("replica %s leaves", said.replica_id)
        self._drop(said.replica_id, lease)

    def _drop(self, replica_id: str, lease: _Lease) -> None:
        del self._leases[replica_id]
        self._table.remove(lease.replica)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            self.sweep()


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    has_only_origin = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and has_only_origin
