"""What people ask: how many replicas, what it costs, who moves, and a page to look at."""

from __future__ import annotations

import math
import time
from html.parser import HTMLParser

import msgspec
import pytest

from billing.config import BillingConfig, RateCardConfig
from billing.rates import NoRateError, RateBook
from simulator.assumptions import assumptions
from simulator.cost import bill_of, tokens_per_day
from simulator.disaggregated import Split
from simulator.fleet import PoolEvent
from simulator.histogram import RELATIVE_ERROR
from simulator.measures import Recorder, Results, Targets
from simulator.report import Page, render
from simulator.routing_cost import movement, routing_cost
from simulator.scenario import Scenario, SessionSource
from simulator.sessions import SessionShape
from simulator.sizing import Need, least_replicas
from simulator.step_time import ReplicaProfile
from tests.unit.simulator.conftest import request

MODEL = "@cf/test/model"
NOW_US = 1_796_000_000_000_000


def results(num_replicas: int, ttft_s: float) -> Results:
    recorder = Recorder(60.0, Targets())
    one = request(0, [1], output=3)
    one.first_token_s, one.finished_s, one.cached_tokens = ttft_s, ttft_s + 0.04, 8
    recorder.finished(one)
    return recorder.results("rendezvous", num_replicas, 0, {"replica-0": 9})


@pytest.mark.parametrize("enough", [1, 2, 3, 7, 8, 50])
def test_sizing_finds_the_least_number(enough: int) -> None:
    asked: list[int] = []

    def simulate(count: int) -> Results:
        asked.append(count)
        return results(count, 1.0 if count >= enough else 9.0)

    found = least_replicas(simulate, Need(2.0, 0.05), 64)
    assert found.num_replicas == enough
    assert len(asked) <= 2 * math.log2(enough) + 3 if enough > 1 else asked == [1]


def test_sizing_says_when_nothing_is_enough() -> None:
    found = least_replicas(lambda count: results(count, 9.0), Need(2.0, 0.05), 10)
    assert found.num_replicas is None
    assert [run.num_replicas for run in found.runs] == [1, 2, 4, 8, 10]


def test_percentiles_goodput_and_windows() -> None:
    recorder = Recorder(10.0, Targets(ttft_s=1.0, tpot_s=0.02))
    for number in range(100):
        one = request(number, [1], at_s=number * 0.5, output=11 if number % 2 else 1)
        one.first_token_s = one.arrival_s + (0.5 if number < 90 else 5.0)
        one.finished_s = one.first_token_s + 0.1
        recorder.finished(one)
    found = recorder.results("p", 2, 3, {"a": 30, "b": 10})
    assert (found.ttft.p50, found.ttft.p99) == pytest.approx((0.5, 5.0), rel=RELATIVE_ERROR)
    assert found.tpot.p50 == pytest.approx(0.01, rel=RELATIVE_ERROR)
    assert found.goodput == pytest.approx(90 / found.duration_s)
    assert (found.imbalance, found.num_refused) == (1.5, 3)
    assert [window.num_requests for window in found.windows] == [20] * 5
    assert Recorder(10.0, Targets()).results("p", 1, 0, {}).hit_ratio == 0.0


def rate_book() -> RateBook:
    card = RateCardConfig(
        model=MODEL, effective_from="2020-01-01", input="0.60", cached_input="0.10", output="3.00"
    )
    return RateBook.from_config(BillingConfig(rate_cards=[card]))


def test_a_run_is_priced_like_any_usage() -> None:
    found = results(1, 1.0)
    bill = bill_of(found, rate_book(), MODEL, NOW_US)
    assert bill.amount_nanos == 9 * 600 + 8 * 100 + 3 * 3000
    assert bill.undiscounted_nanos == 17 * 600 + 3 * 3000
    assert bill.saved_share == pytest.approx(1 - bill.amount_nanos / bill.undiscounted_nanos)
    assert tokens_per_day(found) == pytest.approx(20 / 1.04 * 86_400)
    with pytest.raises(NoRateError):
        bill_of(found, rate_book(), "@cf/none", NOW_US)


def test_the_tokens_of_long_runs_are_priced_too() -> None:
    """More than a usage record holds."""
    found = msgspec.structs.replace(
        results(1, 1.0), prompt_tokens=5 * 10**9 + 7, cached_tokens=3 * 10**9 + 1, output_tokens=10**9 + 3
    )
    bill = bill_of(found, rate_book(), MODEL, NOW_US)
    assert bill.amount_nanos == (2 * 10**9 + 6) * 600 + (3 * 10**9 + 1) * 100 + (10**9 + 3) * 3000
    nothing = msgspec.structs.replace(found, prompt_tokens=0, cached_tokens=0, output_tokens=0)
    assert bill_of(nothing, rate_book(), MODEL, NOW_US).saved_share == 0.0


@pytest.mark.slow
@pytest.mark.slow
def test_the_64th_replica_takes_its_share_and_gives_it_back() -> None:
    found = movement(63, 20_000)
    assert abs(found.moved_by_growth - 1 / 64) < 0.1 / 64
    assert (found.moved_to_others_than_the_newcomer, found.still_moved_after_shrinking) == (0, 0)


def test_routing_cost_is_the_median_of_what_the_clock_says() -> None:
    ticks = iter(range(10**9))
    cost = routing_cost(4, clock=lambda: next(ticks) * 1e-6)
    assert (cost.rendezvous_us, cost.ring_us) == pytest.approx((1.0, 1.0))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name in ("src", "href") and "//" in (value or "") for name, value in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
def test_the_page_has_every_run_its_plots_and_what_it_rests_on(profile: ReplicaProfile) -> None:
    shape = SessionShape(
        num_sessions=20,
        sessions_per_s=2.0,
        shared_tokens=64,
        mean_first_tokens=50,
        mean_turn_tokens=20,
        mean_output_tokens=8,
        max_prompt_tokens=300,
        block_tokens=16,
    )
    scenario = Scenario(
        SessionSource(shape),
        profile,
        2,
        split=Split(1, 1),
        pool_events=(PoolEvent(5.0, "fail", "replica-1"),),
    )
    runs = [scenario.run(policy) for policy in ("rendezvous", "round-robin")]
    bill = bill_of(runs[0], rate_book(), MODEL, time.time_ns() // 1000)
    text = render(
        Page("Two <replicas>", scenario, runs, [bill, None], assumptions(scenario), "embergate simulate")
    )
    reader = _Reader()
    reader.feed(text)
    assert reader.tags.count("svg") == 2
    assert "script" not in reader.tags
    for shown in (
        "Two <replicas>",
        "rendezvous",
        "round-robin",
        "no rate card",
        "prefill apart",
        f"{runs[0].prompt_tokens:,}",
    ):
        assert shown in reader.text  # fmt: skip
