from __future__ import annotations

from dataclasses import dataclass

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.limits import RefusedError, SchedulerLimits
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.prefix_cache import PrefixCache
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import InvariantError, Sequence, SequenceStatus
from backend.engine.step_builder import Step
from tests.support.fake_model import FakeModel, alone

SIZE = 4


@dataclass
class House:
    """A scheduler, its pool and a fake model."""

    scheduler: Scheduler
    pool: BlockPool
    model: FakeModel

    @classmethod
    def of(cls, num_blocks: int = 64, *, has_cache: bool = True, **limits: int) -> House:
        defaults = {
            "block_size": SIZE,
            "max_model_len": 100,
            "max_tokens_per_step": 64,
            "max_running": 8,
            "max_waiting": 8,
        }
        cache = PrefixCache(SIZE) if has_cache else None
        pool = BlockPool(num_blocks, cache)
        scheduler = Scheduler(SchedulerLimits(**{**defaults, **limits}), pool, cache)
        return cls(scheduler, pool, FakeModel(num_blocks, SIZE))

    def add(
        self, sequence_id: int, prompt: list[int], max_tokens: int = 4, arrived_at_s: float = 0.0
    ) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = SequenceRequest(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=sampling)
        sequence = Sequence(request, arrived_at_s=arrived_at_s)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.plan()
        states = self.model.run(step.plan)
        self.scheduler.commit(step, [self.model.next_token(state) for state in states])
        self.scheduler.check_invariants()
        return step

    def run(self) -> list[Step]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
        return steps


def generated(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * at + salt) % 50 for at in range(length)]


def test_decodes_come_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    house = House.of(max_tokens_per_step=10, max_running=4)
    house.add(1, prompt_of(5), max_tokens=20)
    house.step()
    house.add(2, prompt_of(30, salt=1))
    step = house.step()
    assert [(c.sequence_id, len(c.token_ids), c.needs_logits) for c in step.plan.chunks] == [
        (1, 1, True),
        (2, 9, False),
    ]
    assert step.rows == step.sequences[:1]


def test_prefill_can_be_cut_by_how_many_decode_and_how_many_wait() -> None:
    house = House.of(max_tokens_per_step=40, max_running=4)
    house.add(1, prompt_of(5), max_tokens=20)
    house.step()
    for sequence_id in (2, 3):
        house.add(sequence_id, prompt_of(30, salt=sequence_id))
    asked = []

    def allow_prefill(num_decodes: int, num_prefills: int) -> int:
        asked.append((num_decodes, num_prefills))
        return 8

    plan = house.scheduler.plan(allow_prefill).plan
    assert asked == [(1, 2)]
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [1, 4, 4]


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_oldest_gets_on() -> None:
    house = House.of(num_blocks=80, max_tokens_per_step=20, max_model_len=120, max_running=8)
    house.add(1, prompt_of(100), max_tokens=1)
    house.step()
    for sequence_id, length in ((2, 90), (3, 6), (4, 3)):
        house.add(sequence_id, prompt_of(length, salt=sequence_id), max_tokens=1)

    def lengths(step: Step) -> dict[int, int]:
        return {chunk.sequence_id: len(chunk.token_ids) for chunk in step.plan.chunks}

    assert lengths(house.step()) == {1: 10, 4: 3, 3: 6, 2: 1}
    assert lengths(house.step()) == {1: 10, 2: 10}
    house.run()
    assert house.scheduler.counters.num_computed_tokens == 199


def test_what_the_short_ones_leave_of_the_budget_is_the_oldests() -> None:
    house = House.of(max_tokens_per_step=20, max_running=8)
    house.add(1, prompt_of(60), max_tokens=1)
    house.add(2, prompt_of(3, salt=1), max_tokens=1)
    assert [len(chunk.token_ids) for chunk in house.step().plan.chunks] == [17, 3]


def test_a_long_prompt_is_computed_in_chunks_once() -> None:
    house = House.of(max_tokens_per_step=16)
    sequence = house.add(1, prompt_of(40), max_tokens=1)
    steps = house.run()
    assert [step.plan.num_tokens for step in steps] == [16, 16, 8]
    assert sequence.cached_prompt_tokens == 0
    assert house.scheduler.counters.num_computed_tokens == 40


def test_reuse_is_not_capped_by_the_chunk_and_own_chunks_are_no_hits() -> None:
    """Both opposite faults of chunked prefill: a lookup for the first chunk only, and hits on oneself."""
    house = House.of(max_tokens_per_step=16, max_running=1)
    cold, warm = house.add(1, prompt_of(40), max_tokens=1), house.add(2, prompt_of(40), max_tokens=1)
    house.run()
    assert cold.cached_prompt_tokens == 0
    assert warm.cached_prompt_tokens == 36
    assert house.scheduler.counters.num_computed_tokens == 44
    assert generated(cold) == generated(warm)


def test_the_cached_count_is_the_full_blocks_of_all_but_the_last_token() -> None:
    for length in range(1, 30):
        house = House.of()
        house.add(1, prompt_of(length), max_tokens=1)
        house.run()
        warm = house.add(2, prompt_of(length), max_tokens=1)
        house.run()
        assert warm.cached_prompt_tokens == (length - 1) // SIZE * SIZE


def test_the_answer_of_one_turn_is_cached_for_the_next() -> None:
    house = House.of()
    first = house.add(1, prompt_of(10), max_tokens=11)
    house.run()
    second = house.add(2, [*first.token_ids, 1, 2, 3], max_tokens=1)
    house.run()
    assert second.cached_prompt_tokens == 20


def test_preempted_sequences_never_report_their_own_blocks() -> None:
    house = House.of(num_blocks=12, max_running=8)
    sequences = [house.add(index, prompt_of(9, salt=index), max_tokens=16) for index in range(8)]
    house.run()
    assert house.scheduler.counters.num_preemptions > 0
    assert [sequence.cached_prompt_tokens for sequence in sequences] == [0] * 8
    assert house.scheduler.counters.num_cached_prompt_tokens == 0
    assert house.scheduler.counters.num_prompt_tokens == 72
    for index, sequence in enumerate(sequences):
        assert generated(sequence) == alone(prompt_of(9, salt=index), 16)


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    house = House.of(num_blocks=9, max_running=3)
    sequences = [house.add(index, prompt_of(4, salt=index), max_tokens=12) for index in (1, 2, 3)]
    waiting = house.add(4, prompt_of(4, salt=4), max_tokens=1)
    while house.scheduler.counters.num_preemptions == 0:
        house.step()
    assert [sequence.status for sequence in sequences] == [
        SequenceStatus.RUNNING,
        SequenceStatus.RUNNING,
        SequenceStatus.WAITING,
    ]
    while waiting.status is SequenceStatus.WAITING:
        assert sequences[2].status is SequenceStatus.WAITING, "the preempted one was overtaken"
        step = house.step()
    ids = [sequence.sequence_id for sequence in step.sequences]
    assert ids.index(3) < ids.index(4)
    house.run()
    for index, sequence in zip((1, 2, 3), sequences, strict=True):
        assert generated(sequence) == alone(prompt_of(4, salt=index), 12)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    house = House.of(max_tokens_per_step=64)
    sequences = [house.add(index, prompt_of(41), max_tokens=3) for index in range(4)]
    house.run()
    assert [sequence.cached_prompt_tokens for sequence in sequences] == [0, 40, 40, 40]
    assert house.scheduler.counters.num_computed_tokens == 41 + 3 * 1 + 4 * 2


def test_an_abort_of_the_one_that_computes_a_shared_prefix_lets_the_next_go_on() -> None:
    house = House.of(max_tokens_per_step=16)
    house.add(1, prompt_of(41))
    second = house.add(2, prompt_of(41))
    house.step()
    assert second.status is SequenceStatus.WAITING
    house.scheduler.finish(1)
    house.run()
    assert second.cached_prompt_tokens == 16
    assert generated(second) == alone(prompt_of(41), 4)


def test_without_a_cache_nothing_is_reused() -> None:
    house = House.of(has_cache=False)
    for index in (1, 2):
        sequence = house.add(index, prompt_of(20))
        house.run()
        assert sequence.cached_prompt_tokens == 0
    assert house.pool.num_free == house.pool.num_blocks


def test_admission_is_in_order_of_arrival() -> None:
    """A large sequence at the head is not overtaken by a small one behind it."""
    house = House.of(num_blocks=25, max_running=4, has_cache=False)
    house.add(1, prompt_of(60), max_tokens=20)
    large = house.add(2, prompt_of(60, salt=1), max_tokens=1)
    small = house.add(3, prompt_of(4, salt=2), max_tokens=1)
    house.step()
    house.step()
    assert (large.status, small.status) == (SequenceStatus.WAITING, SequenceStatus.WAITING)
    house.run()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 9])
def test_an_abort_is_idempotent_in_every_state(num_steps: int) -> None:
    """Queued, prefilling, decoding, finished."""
    house = House.of(max_tokens_per_step=16)
    sequence = house.add(1, prompt_of(30), max_tokens=4)
    other = house.add(2, prompt_of(30, salt=3), max_tokens=12)
    for _ in range(num_steps):
        house.step()
    was_over = sequence.status is SequenceStatus.FINISHED
    ended = house.scheduler.finish(1)
    assert (ended is None) == was_over
    assert sequence.finish_reason == ("length" if was_over else "abort")
    assert sequence.block_table == []
    house.scheduler.check_invariants()
    assert house.scheduler.finish(1) is None
    assert house.scheduler.finish(12345) is None
    house.run()
    assert generated(other) == alone(prompt_of(30, salt=3), 12)
    assert house.pool.num_used == 0


def test_a_preempted_sequence_can_be_aborted() -> None:
    house = House.of(num_blocks=6, max_running=2)
    house.add(1, prompt_of(8), max_tokens=12)
    second = house.add(2, prompt_of(8, salt=1), max_tokens=12)
    while house.scheduler.counters.num_preemptions == 0:
        house.step()
    assert second.status is SequenceStatus.WAITING
    assert house.scheduler.finish(2) is second
    house.run()


def test_a_result_for_a_sequence_that_ended_meanwhile_is_dropped() -> None:
    house = House.of()
    sequence = house.add(1, prompt_of(8))
    step = house.scheduler.plan()
    house.scheduler.finish(1)
    house.scheduler.commit(step, [1])
    assert generated(sequence) == []
    house.scheduler.check_invariants()


def test_what_can_never_fit_is_refused_at_once() -> None:
    house = House.of(num_blocks=5, max_model_len=30)
    for length, sentence in (
        (27, "maximum context length is 30 tokens. However, you requested 31 tokens (27 in the messages, 4"),
        (18, "maximum context length is 20 tokens on this replica. However, you requested 22 tokens"),
    ):
        with pytest.raises(RefusedError) as refusal:
            house.add(1, prompt_of(length), max_tokens=4)
        assert refusal.value.code == "context_length_exceeded"
        assert sentence in refusal.value.message
    assert not house.scheduler.has_work
    house.add(1, prompt_of(17), max_tokens=4)
    house.run()


def test_kimis_whole_context_fits_to_the_token_and_takes_blocks_for_what_is_known_only() -> None:
    limits = SchedulerLimits(
        block_size=16, max_model_len=262_144, max_tokens_per_step=8192, max_running=1, max_waiting=1
    )
    pool = BlockPool(16_384)
    scheduler = Scheduler(limits, pool)

    def sequence(length: int, max_tokens: int) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens)
        return Sequence(SequenceRequest(sequence_id=1, prompt_token_ids=[7] * length, sampling=sampling))

    with pytest.raises(RefusedError, match=r"262144 tokens\. However, you requested 262145 tokens"):
        scheduler.add(sequence(262_140, 5))
    longest = sequence(262_140, 4)
    scheduler.add(longest)
    scheduler.plan()
    assert pool.num_used == 16_384
    scheduler.finish(1)
    scheduler.add(sequence(1000, 261_144))
    scheduler.plan()
    assert pool.num_used == 63
    scheduler.check_invariants()


def test_a_full_queue_refuses() -> None:
    house = House.of(max_running=1, max_waiting=2)
    for index in range(3):
        house.add(index, prompt_of(4))
    with pytest.raises(RefusedError) as refusal:
        house.add(3, prompt_of(4))
    assert refusal.value.code == "queue_full"
    house.run()


def test_reject_if_busy_refuses_instead_of_waiting() -> None:
    house = House.of(max_running=1)
    house.add(1, prompt_of(4))
    request = SequenceRequest(sequence_id=2, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
    with pytest.raises(RefusedError) as refusal:
        house.scheduler.add(Sequence(request), reject_if_busy=True)
    assert refusal.value.code == "busy"
    house.run()
    house.scheduler.add(Sequence(request), reject_if_busy=True)
    house.run()


def test_only_those_that_were_never_admitted_expire() -> None:
    house = House.of(num_blocks=6, max_running=2)
    house.add(1, prompt_of(8), max_tokens=12, arrived_at_s=1.0)
    preempted = house.add(2, prompt_of(8, salt=1), max_tokens=12, arrived_at_s=2.0)
    late = house.add(3, prompt_of(8, salt=2), arrived_at_s=3.0)
    later = house.add(4, prompt_of(8, salt=2), arrived_at_s=4.0)
    while house.scheduler.counters.num_preemptions == 0:
        house.step()
    assert house.scheduler.expire(3.5) == [late]
    assert late.finish_reason == "error"
    assert house.scheduler.expire(3.5) == []
    house.run()
    assert (preempted.finish_reason, later.finish_reason) == ("length", "length")


def test_stop_tokens_and_lengths_end_a_sequence() -> None:
    expected = alone(prompt_of(6), 10)
    house = House.of(max_model_len=16)
    request = SequenceRequest(
        sequence_id=1,
        prompt_token_ids=prompt_of(6),
        sampling=SamplingParams(max_tokens=10, stop_token_ids=(expected[2],)),
    )
    stopped = Sequence(request, eos_token_ids=(expected[4],))
    house.scheduler.add(stopped)
    longest = house.add(2, prompt_of(6), max_tokens=10)
    house.run()
    assert (generated(stopped), stopped.finish_reason) == (expected[:3], "stop")
    assert (generated(longest), longest.finish_reason) == (expected, "length")


def test_ignore_eos_leaves_the_requests_own_stop_tokens() -> None:
    sampling = SamplingParams(max_tokens=1, stop_token_ids=(5,), ignore_eos=True)
    request = SequenceRequest(sequence_id=1, prompt_token_ids=[1], sampling=sampling)
    assert Sequence(request, eos_token_ids=(2,)).stop_token_ids == {5}


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_running": 0}, "max_running"),
        ({"block_size": 0}, "block_size"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_tokens_per_step": 7}, "max_tokens_per_step"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        House.of(**limits)


def test_an_id_in_use_is_refused() -> None:
    house = House.of()
    house.add(1, prompt_of(4))
    with pytest.raises(ValueError, match="sequence_id"):
        house.add(1, prompt_of(4))


def test_the_check_sees_a_leak() -> None:
    house = House.of()
    sequence = house.add(1, prompt_of(8))
    house.step()
    sequence.block_table = sequence.block_table[:-1]
    with pytest.raises(InvariantError):
        house.scheduler.check_invariants()
