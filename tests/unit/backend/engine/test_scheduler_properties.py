"""Random lives of the scheduler: whatever comes, nothing is lost, and everyone gets the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.limits import RefusedError, SchedulerLimits
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.prefix_cache import PrefixCache
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Sequence, SequenceStatus
from backend.engine.step_builder import Step
from tests.support.fake_model import FakeModel, alone
from tests.support.oracle_lookup import OracleLookup

NUM_RUNS = 300


def told(sequence: Sequence) -> list[int]:
    """What the model will have said to a sequence in the end."""
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    return alone(prompt, sequence.sampling.max_tokens, stop=sequence.stop_token_ids)


@dataclass
class Life:
    """One random run: a scheduler over a small pool, and everything that must be true of it."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        size = rng.choice([1, 2, 3, 4, 8])
        max_model_len = rng.randint(4, 60)
        least = -(-max_model_len // size)
        num_blocks = rng.randint(least, least * rng.choice([1, 2, 4]))
        max_running = rng.randint(1, 8)
        self.limits = SchedulerLimits(
            block_size=size,
            max_model_len=max_model_len,
            max_tokens_per_step=rng.randint(max_running, max_running + 40),
            max_running=max_running,
            max_waiting=rng.randint(0, 20),
        )
        self.cache = PrefixCache(size) if rng.random() < 0.8 else None
        self.pool = BlockPool(num_blocks, self.cache)
        lookup = None
        if rng.random() < 0.5:
            lookup = OracleLookup(told, random.Random(self.seed), wrong_share=rng.choice([0.0, 0.2, 0.6]))
        self.scheduler = Scheduler(self.limits, self.pool, self.cache, lookup)
        self.model = FakeModel(num_blocks, size)
        self.stems = [[rng.randrange(50) for _ in range(max_model_len)] for _ in range(3)]
        self.sequences: list[Sequence] = []
        self.aborted: set[int] = set()
        self.first_cached: dict[int, int] = {}

    def arrive(self) -> None:
        rng, limits = self.rng, self.limits
        length = rng.randint(1, limits.max_model_len)
        stem = rng.choice(self.stems)
        shared = rng.randint(0, length)
        prompt = stem[:shared] + [rng.randrange(50) for _ in range(length - shared)]
        request = SequenceRequest(
            sequence_id=len(self.sequences),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=rng.randint(1, 20), stop_token_ids=(7,)),
            cache_salt=rng.choice([b"", b"a"]),
        )
        sequence = Sequence(request)
        try:
            self.scheduler.add(sequence)
        except RefusedError as refusal:
            if refusal.code == "context_length_exceeded":
                assert length + request.sampling.max_tokens > limits.max_model_len
            else:
                num_known = self.scheduler.num_running + self.scheduler.num_waiting
                assert num_known == limits.max_running + limits.max_waiting
            return
        self.sequences.append(sequence)

    def step(self) -> Step:
        allowance = self.rng.choice([None, 1, 5])
        decoding = {s.sequence_id for s in self.sequences if s.status is SequenceStatus.RUNNING}
        decoding &= {s.sequence_id for s in self.sequences if s.num_uncomputed_tokens == 1}
        step = self.scheduler.plan(lambda num_decodes, num_prefills: allowance)
        num_decodes = sum(1 for s in step.sequences if s.sequence_id in decoding)
        for chunk in step.plan.chunks:
            assert chunk.num_drafts == 0 or chunk.is_decode
        if allowance is not None:
            assert step.plan.num_tokens <= num_decodes + allowance
        self.check_plan(step)
        self.accept_all(step, iter([self.model.next_token(state) for state in self.model.run(step.plan)]))
        self.scheduler.settle(step)
        self.scheduler.check_invariants()
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == self.pool.num_blocks
        return step

    def accept_all(self, step: Step, tokens: Iterator[int]) -> None:
        """Accept the model's token of every chunk, and those behind guesses that were right."""
        for chunk, sequence in zip(step.plan.chunks, step.sequences, strict=True):
            own = [next(tokens) for _ in range(chunk.num_rows)]
            drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
            for place, token_id in enumerate(own):
                if not self.scheduler.accept(sequence, token_id) or [token_id] != list(
                    drafts[place : place + 1]
                ):
                    break

    def check_plan(self, step: Step) -> None:
        assert step.plan.chunks, "there is work, but nothing was planned"
        assert step.plan.num_tokens <= self.limits.max_tokens_per_step
        assert len(step.plan.chunks) <= self.limits.max_running
        ids = [chunk.sequence_id for chunk in step.plan.chunks]
        assert len(set(ids)) == len(ids)
        for sequence in step.sequences:
            assert sequence.cached_prompt_tokens is not None
            known = self.first_cached.setdefault(sequence.sequence_id, sequence.cached_prompt_tokens)
            assert known == sequence.cached_prompt_tokens, "cached_prompt_tokens changed after admission"

        self.check_sharing(step)

    def check_sharing(self, step: Step) -> None:
        """A block in two tables holds the same tokens of the same account for both."""
        size = self.limits.block_size
        content: dict[int, tuple[bytes, list[int]]] = {}
        for sequence in step.sequences:
            for index, block in enumerate(sequence.block_table):
                prefix = sequence.token_ids[: (index + 1) * size]
                known = content.setdefault(block, (sequence.cache_salt, prefix))
                assert known == (sequence.cache_salt, prefix)

    def abort_someone(self) -> None:
        sequence = self.rng.choice(self.sequences)
        ended = self.scheduler.finish(sequence.sequence_id)
        if ended is not None:
            self.aborted.add(sequence.sequence_id)
        assert self.scheduler.finish(sequence.sequence_id) is None, "a second abort is nothing"
        self.scheduler.check_invariants()

    def check_end(self) -> None:
        assert self.pool.num_used == 0, "blocks leaked"
        for sequence in self.sequences:
            generated = sequence.token_ids[sequence.num_prompt_tokens :]
            expected = alone(
                sequence.token_ids[: sequence.num_prompt_tokens],
                sequence.sampling.max_tokens,
                stop=sequence.stop_token_ids,
            )
            if sequence.sequence_id in self.aborted:
                assert generated == expected[: len(generated)]
            else:
                assert generated == expected
                assert sequence.finish_reason == ("stop" if expected[-1] == 7 else "length")


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_every_life_ends_well(seed: int) -> None:
    life = Life(seed)
    rng = life.rng
    num_arrivals = rng.randint(1, 40)
    for _ in range(num_arrivals):
        life.arrive()
        for _ in range(rng.randint(0, 4)):
            if life.scheduler.has_work:
                life.step()
        if life.sequences and rng.random() < 0.15:
            life.abort_someone()
    num_steps = 0
    while life.scheduler.has_work:
        life.step()
        num_steps += 1
        assert num_steps < 20_000, "someone never finishes"
    life.check_end()
