from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.sampler import Sampler, uniform
from backend.engine.sequence import Sequence

VOCAB = 32
_ids = itertools.count(1)


def sequence_with(prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 1000, **sampling})
    return Sequence(SequenceRequest(sequence_id=next(_ids), prompt_token_ids=list(prompt), sampling=params))


def new_sampler() -> Sampler:
    return Sampler(itertools.count(1000).__next__)


def logits_of(seed: int = 0, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def choose(logits: torch.Tensor, *sequences: Sequence, sampler: Sampler | None = None) -> list[int]:
    sampler = sampler or new_sampler()
    return [row.token_id for row in sampler.sample(logits.clone(), sequences)]


def draws(count: int, logits: torch.Tensor, **sampling: Any) -> Counter[int]:
    """What ``count`` sequences with different seeds draw from the same logits."""
    sequences = [sequence_with(seed=seed, **sampling) for seed in range(count)]
    return Counter(choose(logits.expand(count, -1), *sequences))


def test_greedy_takes_the_likeliest() -> None:
    logits = logits_of(rows=5)
    sequences = [sequence_with(temperature=0.0) for _ in range(5)]
    assert choose(logits, *sequences) == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_greedy() -> None:
    logits = logits_of()
    assert choose(logits, sequence_with(temperature=1e-9, seed=1)) == logits.argmax(dim=-1).tolist()


def test_draws_follow_the_probabilities() -> None:
    logits = logits_of(vocab=6)
    counts = draws(20_000, logits, temperature=1.5)
    for token_id, probability in enumerate(torch.softmax(logits[0] / 1.5, dim=-1).tolist()):
        spread = math.sqrt(probability * (1 - probability) / 20_000)
        assert abs(counts[token_id] / 20_000 - probability) < 5 * spread


def test_draws_follow_the_probabilities_over_several_runs_of_neighbours() -> None:
    logits = torch.full((1, 1000), -1e9)
    weights = {3: 0.1, 255: 0.2, 256: 0.3, 767: 0.15, 999: 0.25}
    for token_id, weight in weights.items():
        logits[0, token_id] = math.log(weight)
    counts = draws(8_000, logits)
    assert set(counts) == set(weights)
    for token_id, weight in weights.items():
        assert abs(counts[token_id] / 8_000 - weight) < 0.03


def test_uniform_draws_are_uniform_and_independent_in_seed_and_counter() -> None:
    numbers = [uniform(seed, counter) for seed in range(100) for counter in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    histogram = Counter(int(number * 10) for number in numbers)
    assert all(850 < count < 1150 for count in histogram.values())
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    logits = logits_of(rows=40, seed=3)
    for row in range(40):
        params: dict[str, Any] = {"seed": row, "temperature": 1.2}
        if row % 2:
            params["top_p"] = 0.8
        alone = choose(logits[row : row + 1], sequence_with(**params))
        company = [sequence_with(temperature=0.9, top_k=3), sequence_with(temperature=0.0), sequence_with()]
        batch = torch.cat([logits[:1], logits[5:6], logits[row : row + 1], logits[9:10]])
        together = choose(batch, company[0], company[1], sequence_with(**params), company[2])
        assert together[2] == alone[0]


def test_a_seed_gives_other_tokens_at_other_positions() -> None:
    logits = torch.zeros(1, VOCAB)
    sequence, sampler = sequence_with(seed=5), new_sampler()
    tokens = []
    for _ in range(20):
        tokens += choose(logits, sequence, sampler=sampler)
        sequence.token_ids.append(tokens[-1])
    assert len(set(tokens)) > 5
    again = sequence_with(seed=5)
    again.token_ids += tokens[:10]
    assert choose(logits, again) == [tokens[10]], "a draw depends on the position, not on earlier draws"


def test_a_sequence_without_a_seed_draws_one_and_keeps_it() -> None:
    sampler = new_sampler()
    logits = torch.zeros(2, VOCAB)
    first, second = sequence_with(), sequence_with()
    tokens = choose(logits, first, second, sampler=sampler)
    assert choose(logits, first, second, sampler=sampler) == tokens
    assert tokens[0] != tokens[1]


def test_top_k_keeps_k() -> None:
    logits = logits_of()
    allowed = set(logits[0].topk(3).indices.tolist())
    assert set(draws(400, logits, temperature=3.0, top_k=3)) == allowed


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.15, 0.3]]))
    assert set(draws(400, logits, top_p=0.79)) == {1, 3}
    assert set(draws(400, logits, top_p=0.81)) == {1, 3, 2}
    assert set(draws(50, logits, top_p=1e-6)) == {1}


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert set(draws(400, logits, top_k=2, top_p=0.6)) == {0, 1}
    assert set(draws(400, logits, top_k=2, top_p=0.5)) == {0}, "0.4 of 0.7 is more than half"


def test_min_p_keeps_what_is_likely_beside_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draws(400, logits, min_p=0.29)) == {0, 1, 2}
    assert set(draws(400, logits, min_p=0.5)) == {0, 1}


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 30.0},
        {"min_p": 0.1},
        {"min_p": 1e-6, "temperature": 50.0},
        {"top_k": 700, "top_p": 0.5, "temperature": 20.0},
        {"top_k": 700, "min_p": 0.001},
    ],
)
def test_the_short_cut_over_candidates_changes_nothing(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(rows=1, vocab=2000)
    short = [choose(logits, sequence_with(seed=seed, **sampling)) for seed in range(60)]
    monkeypatch.setattr("backend.engine.sampler.CANDIDATE_RATIOS", (0.0,))
    assert [choose(logits, sequence_with(seed=seed, **sampling)) for seed in range(60)] == short


def test_logit_bias_bans_and_forces() -> None:
    logits = logits_of()
    best, second = logits[0].topk(2).indices.tolist()
    assert choose(logits, sequence_with(temperature=0.0, logit_bias={best: -100.0})) == [second]
    assert choose(logits, sequence_with(temperature=0.0, logit_bias={7: 100.0})) == [7]


def penalised(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The definition: repetition over prompt and output, then frequency and presence over the output."""
    sampling, row = sequence.sampling, logits[0].clone()
    for token_id in set(sequence.token_ids):
        value = row[token_id]
        factor = sampling.repetition_penalty
        row[token_id] = value / factor if value > 0 else value * factor
    for token_id, count in Counter(sequence.token_ids[sequence.num_prompt_tokens :]).items():
        row[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return row


def test_penalties_follow_their_definition_token_by_token() -> None:
    sequence = sequence_with(
        prompt=tuple(range(0, 8)),
        temperature=0.0,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        repetition_penalty=1.3,
    )
    sampler = new_sampler()
    for step in range(200):
        logits = logits_of(seed=step)
        expected = int(penalised(logits, sequence).argmax())
        assert choose(logits, sequence, sampler=sampler) == [expected]
        sequence.token_ids.append(expected)


def test_frequency_and_presence_do_not_look_at_the_prompt() -> None:
    logits = logits_of()
    best = int(logits.argmax())
    sequence = sequence_with(prompt=(best,) * 9, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    assert choose(logits, sequence) == [best]


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = logits_of()
    expected = torch.log_softmax(logits[0], dim=-1)
    best, second = logits[0].topk(2).indices.tolist()
    sequence = sequence_with(temperature=0.0, logit_bias={best: -100.0}, num_logprobs=3)
    (sampled,) = new_sampler().sample(logits.clone(), [sequence])
    assert sampled.logprobs is not None
    assert sampled.token_id == sampled.logprobs.token_id == second
    assert sampled.logprobs.logprob == pytest.approx(float(expected[second]))
    assert [token_id for token_id, _ in sampled.logprobs.top] == logits[0].topk(3).indices.tolist()
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(expected.topk(3).values.tolist())


def test_logprobs_go_to_those_that_asked() -> None:
    sequences = [sequence_with(), sequence_with(num_logprobs=0), sequence_with(temperature=0.0)]
    sampled = new_sampler().sample(logits_of(rows=3), sequences)
    assert [row.logprobs is None for row in sampled] == [True, False, True]
    assert sampled[1].logprobs is not None
    assert sampled[1].logprobs.top == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_spoil_their_own_row_only(bad: float) -> None:
    for sampling in ({"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5, "num_logprobs": 1}):
        logits = logits_of(rows=3)
        expected = choose(logits[:1], sequence_with(**sampling))
        logits[1, 4] = bad
        sampled = new_sampler().sample(logits, [sequence_with(**sampling) for _ in range(3)])
        assert [row.is_usable for row in sampled] == [True, False, True]
        assert sampled[0].token_id == expected[0]


def test_what_is_remembered_is_forgotten() -> None:
    sampler, sequence = new_sampler(), sequence_with(frequency_penalty=1.0)
    choose(logits_of(), sequence, sampler=sampler)
    assert sampler.num_remembered == 1
    sampler.forget(sequence.sequence_id)
    sampler.forget(sequence.sequence_id)
    assert sampler.num_remembered == 0
