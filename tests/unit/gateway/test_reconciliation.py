"""Records that a predecessor could not write."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec
import pytest

from backend.wire import RecentUsage, RecentUsages, TokenUsage
from billing.store import StoreError
from billing.usage import UsageRecord
from gateway.client import ReplicaError, ReplicaUnreachableError
from gateway.config import ReplicaAddress
from gateway.metering import MeteringUnavailableError
from gateway.reconciliation import KnownRequests, Reconciler
from gateway.replicas import Replica
from gateway.wire.replica import BillingContext, encode_billing_context

CONTEXT = encode_billing_context(
    BillingContext(
        account_id="a" * 32,
        token_id="t",
        model="m",
        requested_model="alias",
        surface="run",
        session="ses_1",
        started_at_us=1_000_000,
        gateway_id="gateway-1",
    )
)


class Pages:
    """The client's side of a replica that keeps ``usages`` and answers in pages of two."""

    def __init__(self) -> None:
        self.usages: list[RecentUsage] = []
        self.started_at = 1.0
        self.asked: list[int] = []
        self.error: ReplicaError | None = None
        self.status = 200

    def add(self, request_id: str, context: str = CONTEXT, cached: int = 4) -> None:
        self.usages.append(
            RecentUsage(
                sequence=len(self.usages) + 1,
                request_id=request_id,
                billing_context=context,
                usage=TokenUsage.of(prompt=10, cached=cached, completion=3, reasoning=1),
                finish_reason="stop",
                finished_at=2.5,
            )
        )

    async def fetch(
        self, address: ReplicaAddress, path: str, headers: object, *, timeout_s: float
    ) -> tuple[int, bytes]:
        if self.error is not None:
            raise self.error
        after = int(path.rpartition("=")[2])
        self.asked.append(after)
        page = [usage for usage in self.usages if usage.sequence > after][:2]
        next_after = page[-1].sequence if page else after
        body = RecentUsages(replica_id="r0", started_at=self.started_at, usages=page, next_after=next_after)
        return self.status, msgspec.json.encode(body)


class Ledger:
    """What is posted, and what is committed through it."""

    def __init__(self) -> None:
        self.posted: set[str] = set()
        self.committed: list[UsageRecord] = []
        self.error: Exception | None = None

    def has_record(self, request_ids: Collection[str]) -> set[str]:
        if isinstance(self.error, StoreError):
            raise self.error
        return self.posted & set(request_ids)

    async def commit(self, record: UsageRecord) -> None:
        if self.error is not None:
            raise self.error
        self.committed.append(record)

    @property
    def ids(self) -> list[str]:
        return [record.request_id for record in self.committed]


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def known() -> KnownRequests:
    return KnownRequests(max_finished=3)


@pytest.fixture
def replica() -> Replica:
    return Replica(ReplicaAddress(id="r0", url="http://127.0.0.1:1"))


@pytest.fixture
def reconciler(pages: Pages, ledger: Ledger, known: KnownRequests) -> Reconciler:
    return Reconciler(pages, (), ledger, known, ledger.commit, gateway_id="gateway-1", timeout_s=1)  # type: ignore[arg-type]


async def test_what_another_gateway_served_is_left_to_it(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    """Its record may wait in that one's journal: one of ours would come first, and charge nothing."""
    pages.add("theirs", CONTEXT.replace("gateway-1", "gateway-2"))
    pages.add("ours")
    assert await reconciler.reconcile(replica) == 1
    assert ledger.ids == ["ours"]


async def test_missing_records_are_written_from_every_page(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    for index in range(5):
        pages.add(f"q{index}")
    ledger.posted = {"q1"}
    assert await reconciler.reconcile(replica) == 4
    assert ledger.ids == ["q0", "q2", "q3", "q4"]
    record = ledger.committed[0]
    assert (record.account_id, record.token_id, record.model) == ("a" * 32, "t", "m")
    assert (record.requested_model, record.surface, record.session) == ("alias", "run", "ses_1")
    assert (record.prompt_tokens, record.cached_prompt_tokens, record.completion_tokens) == (10, 4, 3)
    assert (record.reasoning_tokens, record.status, record.replica_id) == (1, "error", "r0")
    assert (record.started_at_us, record.finished_at_us) == (1_000_000, 2_500_000)


async def test_counts_that_cannot_be_true_are_brought_within_bounds_and_marked(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    pages.add("lie", cached=11)
    pages.add("truth")
    assert await reconciler.reconcile(replica) == 2
    assert [one.cached_prompt_tokens for one in ledger.committed] == [10, 4]
    assert [one.is_estimated for one in ledger.committed] == [True, False]


async def test_a_second_pass_reads_only_what_is_new(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    pages.add("q0")
    await reconciler.reconcile(replica)
    pages.add("q1")
    pages.asked.clear()
    assert await reconciler.reconcile(replica) == 1
    assert pages.asked == [1, 2]
    assert ledger.ids == ["q0", "q1"]


async def test_a_restarted_replica_is_read_from_its_beginning(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    for index in range(3):
        pages.add(f"q{index}")
    await reconciler.reconcile(replica)
    pages.usages.clear()
    pages.started_at = 9.0
    pages.add("later")
    assert await reconciler.reconcile(replica) == 1
    assert ledger.ids[-1] == "later"


async def test_requests_of_this_process_are_left_to_it(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, known: KnownRequests, replica: Replica
) -> None:
    for name in ("running", "finished", "lost"):
        pages.add(name)
    known.started("running")
    known.started("finished")
    known.ended("finished")
    await reconciler.reconcile(replica)
    assert ledger.ids == ["lost"]


async def test_requests_of_strangers_are_left_alone(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    pages.add("stranger", context="")
    assert await reconciler.reconcile(replica) == 0
    assert ledger.ids == []


async def test_items_of_batches_are_left_to_the_queue(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    """They are run again until they have a result, and their usage is written with it."""
    pages.add("attempt", CONTEXT.replace('"run"', '"batch"'))
    pages.add("q0")
    assert await reconciler.reconcile(replica) == 1
    assert ledger.ids == ["q0"]


@pytest.mark.parametrize(
    "error", [MeteringUnavailableError("the disk is full"), StoreError("the database is locked")]
)
async def test_what_could_not_be_written_is_tried_again(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica, error: Exception
) -> None:
    pages.add("q0")
    ledger.error = error
    assert await reconciler.reconcile(replica) == 0
    ledger.error = None
    assert await reconciler.reconcile(replica) == 1
    assert ledger.ids == ["q0"]


async def test_a_replica_that_cannot_be_asked_is_asked_next_time(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    pages.add("q0")
    pages.error = ReplicaUnreachableError("r0", "refused")
    assert await reconciler.reconcile(replica) == 0
    pages.error, pages.status = None, 500
    assert await reconciler.reconcile(replica) == 0
    pages.status = 200
    assert await reconciler.reconcile(replica) == 1


async def test_following_asks_again_soon_after(
    reconciler: Reconciler, pages: Pages, ledger: Ledger, replica: Replica
) -> None:
    """The requests of a gateway that was killed a moment ago end on the replica only now."""
    replica.health = "ready"
    following = asyncio.create_task(reconciler.follow(replica))
    await asyncio.sleep(0.05)
    pages.add("late")
    await asyncio.sleep(1.1)
    assert ledger.ids == ["late"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_known_requests_are_bounded() -> None:
    known = KnownRequests(max_finished=2)
    for index in range(4):
        known.started(f"q{index}")
        known.ended(f"q{index}")
    assert [f"q{index}" in known for index in range(4)] == [False, False, True, True]
