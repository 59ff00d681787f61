"""Replay: calibration through figures alone, text that shares what the trace shares, an open loop."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.exchange import Exchange
from loadtest.replay.calibration import Calibration, CalibrationError, calibrate
from loadtest.replay.player import play
from loadtest.replay.prompts import Prompt, PromptMaker, ideal_cached_tokens
from loadtest.replay.report import Targets, report_of
from loadtest.replay.trace import TraceEntry, TraceError, read_trace, synthetic_trace
from loadtest.replay.words import FIRST, WORDS

CALIBRATION = Calibration(25, 6, 16, WORDS)
MANY_WORDS = tuple(f"w{number}" for number in range(100_000))
"""So many that no two short texts are alike by chance."""


class CachingModel:
    """Counts words as a model with one token each would, and caches blocks as an engine does."""

    def __init__(self, before: int, behind: int, block: int, bad_words: frozenset[str] = frozenset()) -> None:
        self._before, self._behind, self._block, self._bad = before, behind, block, bad_words
        self._blocks: set[tuple[str, ...]] = set()

    def tokens(self, text: str) -> list[str]:
        words = text.split(" ")
        assert words[0] == FIRST
        split = [piece for word in words for piece in ([word, "+"] if word in self._bad else [word])]
        return ["<"] * (self._before - 1) + split + [">"] * self._behind

    def ask(self, text: str) -> tuple[int, int]:
        tokens = self.tokens(text)
        ends = range(self._block, len(tokens), self._block) if self._block else range(0)
        cached = 0
        for end in ends:
            if tuple(tokens[:end]) not in self._blocks:
                break
            cached = end
        self._blocks.update(tuple(tokens[:end]) for end in ends)
        return len(tokens), cached

    async def probe(self, text: str) -> tuple[int, int]:
        return self.ask(text)


@pytest.mark.parametrize(
    ("before", "behind", "block"),
    [(25, 6, 16), (16, 4, 16), (1, 1, 64), (33, 5, 32), (127, 9, 128), (7, 3, 1)],
)
async def test_calibration_finds_what_stands_around_the_words(before: int, behind: int, block: int) -> None:
    model = CachingModel(before, behind, block)
    found = await calibrate(model.probe, seed=3)
    assert (found.prefix_tokens, found.suffix_tokens, found.block_tokens) == (before, behind, block)
    assert found.words == WORDS


async def test_words_of_several_tokens_are_left_out() -> None:
    model = CachingModel(25, 6, 16, bad_words=frozenset({"time", "education"}))
    found = await calibrate(model.probe, seed=3)
    assert found.prefix_tokens == 25
    assert not {"time", "education"} & set(found.words)


async def test_without_a_cache_there_are_no_blocks() -> None:
    found = await calibrate(CachingModel(25, 6, 0).probe, seed=3)
    assert (found.prefix_tokens + found.suffix_tokens, found.block_tokens) == (31, 0)


async def test_figures_that_make_no_sense_are_refused() -> None:
    model = CachingModel(25, 6, 16, bad_words=frozenset(WORDS))
    with pytest.raises(CalibrationError, match="single tokens"):
        await calibrate(model.probe, seed=3)
    counts = itertools.count()

    async def restless(text: str) -> tuple[int, int]:
        return len(text.split()) + 30, next(counts) % 7

    with pytest.raises(CalibrationError):
        await calibrate(restless, seed=3)


def entries(rng: random.Random, num: int, block: int) -> list[TraceEntry]:
    """Random trees of prefixes: an id stands for its block and all before it."""
    chains: list[list[int]] = [[]]
    ids = itertools.count()
    found = []
    for number in range(num):
        chain = list(rng.choice(chains))
        chain = chain[: rng.randint(0, len(chain))]
        chain += [next(ids) for _ in range(rng.randint(1, 4))]
        chains.append(chain)
        length = (len(chain) - 1) * block + rng.randint(1, block)
        found.append(TraceEntry(float(number), length, rng.randint(1, 99), chain))
    return found


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([16, 32, 48, 512]), before=st.integers(1, 70))
def test_a_caching_engine_finds_exactly_what_the_trace_shares(seed: int, scale: int, before: int) -> None:
    calibration = Calibration(before, 6, 16, MANY_WORDS)
    maker = PromptMaker(calibration, 512, scale, seed)
    prompts = [maker.prompt(entry) for entry in entries(random.Random(seed), 12, 512)]
    model = CachingModel(before, 6, 16)
    counted = [model.ask(prompt.text) for prompt in prompts]
    assert [tokens for tokens, _ in counted] == [prompt.num_tokens for prompt in prompts]
    assert sum(cached for _, cached in counted) == ideal_cached_tokens(prompts, 16)


def test_blocks_of_the_trace_begin_where_blocks_of_the_engine_begin() -> None:
    maker = PromptMaker(CALIBRATION, 512, 32, seed=1)
    first = maker.prompt(TraceEntry(0, 1536, 1, [0, 1, 2]))
    second = maker.prompt(TraceEntry(1, 1536, 1, [0, 1, 3]))
    model = CachingModel(25, 6, 16)
    assert model.ask(first.text) == (96 + 6, 0)
    assert model.ask(second.text) == (96 + 6, 64)


def test_another_seed_shares_nothing_with_an_earlier_run() -> None:
    entry = TraceEntry(0, 5120, 1, list(range(10)))
    one, other = (PromptMaker(CALIBRATION, 512, 32, seed=seed).prompt(entry) for seed in (1, 2))
    model = CachingModel(25, 6, 16)
    model.ask(one.text)
    assert model.ask(other.text)[1] == 16  # the template alone


def test_lengths_shrink_in_proportion() -> None:
    prompt = PromptMaker(CALIBRATION, 512, 32, seed=1).prompt(
        TraceEntry(0, 512 * 10 + 256, 160, list(range(11)))
    )
    assert (prompt.num_tokens, prompt.max_tokens) == (32 * 10 + 16 + 6, 10)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 9, "output_length": -1, "hash_ids": [1]}', "output_length"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "hash_ids"),
        ('{"timestamp": "x", "input_length": 9, "output_length": 1, "hash_ids": [1]}', "timestamp"),
        ("nonsense", ":1:"),
        ("", "no request"),
    ],
)
def test_a_damaged_trace_is_refused_with_file_line_and_field(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TraceError, match=problem):
        read_trace(path, 512, 10)


def test_the_made_up_trace_is_well_formed_and_shares_much() -> None:
    made = synthetic_trace(60, seed=7)
    assert made == synthetic_trace(60, seed=7)
    assert [each.timestamp for each in made] == sorted(each.timestamp for each in made)
    assert all(len(each.hash_ids) == -(-each.input_length // 512) for each in made)
    maker = PromptMaker(CALIBRATION, 512, 32, seed=1)
    prompts = [maker.prompt(entry) for entry in made]
    share = ideal_cached_tokens(prompts, 16) / sum(prompt.num_tokens for prompt in prompts)
    assert 0.5 < share < 0.9


def prompts_at(*times_ms: float) -> list[Prompt]:
    return [Prompt(TraceEntry(at, 1, 1, [0]), "We", 9, 2, ()) for at in times_ms]


async def test_requests_go_out_when_due_whatever_becomes_of_earlier_ones() -> None:
    running = peak = 0

    async def send(prompt: Prompt) -> Exchange:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.15)
        running -= 1
        return Exchange(sent_s=1.0, first_s=1.1, last_s=1.2, prompt_tokens=9, completion_tokens=2)

    played = await play(prompts_at(0, 100, 200, 300), send, speed=10.0, max_in_flight=8, max_duration_s=5)
    assert peak == 4
    assert [round(each.due_s, 3) for each in played] == [0.0, 0.01, 0.02, 0.03]


async def test_the_bound_holds_requests_back_and_their_waiting_counts() -> None:
    async def send(prompt: Prompt) -> Exchange:
        await asyncio.sleep(0.1)
        return Exchange(sent_s=1.0, first_s=1.05, last_s=1.1, prompt_tokens=9, completion_tokens=2)

    played = await play(prompts_at(0, 0, 0), send, speed=1.0, max_in_flight=1, max_duration_s=5)
    assert played[2].late_s == pytest.approx(0.2, abs=0.08)
    assert played[2].ttft_s == pytest.approx(played[2].late_s + 0.05, abs=1e-6)


async def test_nothing_is_sent_after_the_time_is_over() -> None:
    async def send(prompt: Prompt) -> Exchange:
        return Exchange(sent_s=1.0, first_s=1.0, last_s=1.0)

    played = await play(prompts_at(0, 50, 60_000), send, speed=1.0, max_in_flight=4, max_duration_s=0.2)
    assert len(played) == 2


async def test_the_report_counts_errors_miscounts_and_good_requests() -> None:
    exchanges = iter(
        [
            Exchange(
                sent_s=1.0, first_s=1.5, last_s=1.6, prompt_tokens=9, cached_tokens=4, completion_tokens=2
            ),
            Exchange(sent_s=1.0, first_s=9.0, last_s=9.1, prompt_tokens=9, completion_tokens=2),
            Exchange(sent_s=1.0, first_s=1.5, last_s=1.6, prompt_tokens=8, completion_tokens=2),
            Exchange(sent_s=1.0, error="503: full"),
        ]
    )

    async def send(prompt: Prompt) -> Exchange:
        return next(exchanges)

    played = await play(prompts_at(0, 0, 0, 0), send, speed=1.0, max_in_flight=4, max_duration_s=5)
    report = report_of(played, 0, 8, Targets(2.0, 0.2))
    assert report.errors == {"503: full": 1}
    assert (report.miscounted, report.num_good, report.num_requests) == (1, 2, 4)
    assert report.cached_share == pytest.approx(4 / 26)
    assert report.ideal_share == pytest.approx(8 / 26)
