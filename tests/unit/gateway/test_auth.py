"""API tokens, their cache, and the salts of accounts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from billing.accounts import Principal, hash_token
from billing.store import StoreError
from gateway.auth import Authenticator, SaltMaker
from gateway.config import AuthConfig
from gateway.errors import Reason, Refusal

ALICE = Principal("a" * 32, "token-1", frozenset({"ai:run"}))


class Directory:
    """Principals by secret; counts look-ups, and fails or waits when told to."""

    def __init__(self, **principals: Principal) -> None:
        self.by_hash = {hash_token(secret): principal for secret, principal in principals.items()}
        self.num_lookups = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    def find_principal(self, token_hash: bytes) -> Principal | None:
        self.num_lookups += 1
        self.may_answer.wait(5)
        if self.error is not None:
            raise self.error
        return self.by_hash.get(token_hash)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def authenticator(directory: Directory, clock: Clock, **config: float) -> Authenticator:
    return Authenticator(directory, AuthConfig(**config), clock)  # type: ignore[arg-type]


async def reason_of(auth: Authenticator, authorization: str | None, account: str = "a" * 32) -> Reason | None:
    try:
        await auth.authenticate(authorization, account)
    except Refusal as refusal:
        return refusal.reason
    return None


async def test_a_valid_token_gives_its_principal() -> None:
    auth = authenticator(Directory(good=ALICE), Clock())
    assert await auth.authenticate("Bearer good", "a" * 32) == ALICE
    assert await auth.authenticate("bearer   good ", "a" * 32) == ALICE


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic good", "good", "Bearer bad"])
async def test_anything_else_is_refused_alike(authorization: str | None) -> None:
    auth = authenticator(Directory(good=ALICE), Clock())
    assert await reason_of(auth, authorization) is Reason.AUTHENTICATION


@pytest.mark.parametrize("account", ["b" * 32, "A" * 32, "a" * 31, "\udcff"])
async def test_a_token_is_bound_to_its_account(account: str) -> None:
    auth = authenticator(Directory(good=ALICE), Clock())
    assert await reason_of(auth, "Bearer good", account) is Reason.AUTHENTICATION


async def test_where_no_account_is_named_it_is_the_tokens_own() -> None:
    auth = authenticator(Directory(good=ALICE), Clock())
    assert await auth.authenticate("Bearer good", "") == ALICE
    assert await reason_of(auth, "Bearer bad", "") is Reason.AUTHENTICATION


async def test_a_token_without_the_permission_is_told_so() -> None:
    reader = Principal("a" * 32, "token-2", frozenset({"analytics:read"}))
    auth = authenticator(Directory(reader=reader), Clock())
    assert await reason_of(auth, "Bearer reader") is Reason.NOT_PERMITTED
    assert await auth.authenticate("Bearer reader", "a" * 32, permission="analytics:read") == reader
    assert await auth.authenticate("Bearer reader", "a" * 32, permission="") == reader


async def test_look_ups_are_cached_for_the_ttl_also_failed_ones() -> None:
    directory, clock = Directory(good=ALICE), Clock()
    auth = authenticator(directory, clock, cache_ttl_s=2.0)
    for _ in range(3):
        assert await reason_of(auth, "Bearer good") is None
        assert await reason_of(auth, "Bearer bad") is Reason.AUTHENTICATION
    assert directory.num_lookups == 2


async def test_a_revoked_token_is_refused_after_the_ttl_at_the_latest() -> None:
    directory, clock = Directory(good=ALICE), Clock()
    auth = authenticator(directory, clock, cache_ttl_s=2.0)
    assert await reason_of(auth, "Bearer good") is None
    directory.by_hash.clear()
    clock.now += 0.9
    assert await reason_of(auth, "Bearer good") is None
    clock.now += 1.11
    assert await reason_of(auth, "Bearer good") is Reason.AUTHENTICATION


async def test_an_ageing_entry_is_renewed_in_the_background() -> None:
    directory, clock = Directory(good=ALICE), Clock()
    auth = authenticator(directory, clock, cache_ttl_s=2.0)
    assert await reason_of(auth, "Bearer good") is None
    clock.now += 1.5
    directory.may_answer.clear()
    assert await asyncio.wait_for(reason_of(auth, "Bearer good"), 1) is None, "it must not wait"
    directory.may_answer.set()
    await asyncio.sleep(0.05)
    assert directory.num_lookups == 2
    clock.now += 0.9  # past the life of the first answer, within that of the second
    assert await reason_of(auth, "Bearer good") is None
    assert directory.num_lookups == 2


async def test_concurrent_requests_share_one_look_up() -> None:
    directory = Directory(good=ALICE)
    auth = authenticator(directory, Clock())
    assert await asyncio.gather(*(reason_of(auth, "Bearer good") for _ in range(20))) == [None] * 20
    assert directory.num_lookups == 1


async def test_the_cache_is_bounded() -> None:
    directory = Directory(good=ALICE)
    auth = authenticator(directory, Clock(), max_cached_tokens=3)
    for index in range(10):
        await reason_of(auth, f"Bearer bad{index}")
    assert len(auth._cache) == 3


async def test_a_directory_that_fails_is_an_error_not_a_refusal_and_is_asked_again() -> None:
    directory, clock = Directory(good=ALICE), Clock()
    auth = authenticator(directory, clock)
    directory.error = RuntimeError("the database is locked")
    with pytest.raises(RuntimeError, match="locked"):
        await auth.authenticate("Bearer good", "a" * 32)
    directory.error = None
    assert await reason_of(auth, "Bearer good") is None


async def test_an_unreachable_database_is_a_refusal_that_invites_a_retry() -> None:
    directory, clock = Directory(good=ALICE), Clock()
    auth = authenticator(directory, clock)
    directory.error = StoreError("connection refused")
    with pytest.raises(Refusal) as caught:
        await auth.authenticate("Bearer good", "a" * 32)
    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.UNAVAILABLE, 1)


async def test_a_failed_renewal_does_not_hurt_requests_while_the_entry_lives() -> None:
    directory, clock = Directory(good=ALICE), Clock()
    auth = authenticator(directory, clock, cache_ttl_s=2.0)
    assert await reason_of(auth, "Bearer good") is None
    clock.now += 1.5
    directory.error = RuntimeError("the database is locked")
    assert await reason_of(auth, "Bearer good") is None
    await asyncio.sleep(0.05)
    assert await reason_of(auth, "Bearer good") is None
    await asyncio.sleep(0.05)


def test_salts_are_pinned_and_framed() -> None:
    """BR-99: the derivation never changes by accident, and different accounts never share a salt."""
    salts = SaltMaker("secret")
    assert salts.salt_for("org_1") == SaltMaker("secret").salt_for("org_1")
    assert salts.salt_for("org_1") == "17006af74cf50e2b39bee23e81c329d6734b64ad05c85386ba017db8a0a4f874"
    names = ["org_1", "org_12", "org_12345", "", "1", "org_1\0"]
    assert len({salts.salt_for(name) for name in names}) == len(names)
    assert SaltMaker("other").salt_for("org_1") != salts.salt_for("org_1")
