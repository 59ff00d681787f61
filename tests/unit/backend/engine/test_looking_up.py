"""What arrives during a step is taken in during it: aborts free blocks at once and harm nobody."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from torch import Tensor

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest, TokenOutput
from backend.engine.step import ShouldStop, StepInterruptedError, StepPlan
from tests.support.fake_engine import POISON_TOKEN_ID, VOCAB_SIZE, FakeRunner
from tests.support.fake_model import alone

NUM_PARTS = 4
NUM_BLOCKS = 32


class PartedRunner(FakeRunner):
    """Asks whether to stop as often as a model of two layers; has written everything by then."""

    num_interrupted = 0
    num_asked = 0

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        logits = super().execute(plan)
        for _ in range(NUM_PARTS):
            self.num_asked += should_stop is not None
            if should_stop is not None and should_stop():
                self.num_interrupted += 1
                raise StepInterruptedError
        return logits


class House:
    """An engine, and what is to happen when it looks up."""

    def __init__(self, runner: PartedRunner | None = None, max_tokens_per_step: int = 128) -> None:
        self.runner = runner or PartedRunner()
        config = BackendConfig(
            replica_id="r0",
            model=ModelSource(path="fake", served_as="fake", max_model_len=256),
            cache=CacheConfig(num_blocks=NUM_BLOCKS),
            scheduler=SchedulerConfig(max_tokens_per_step=max_tokens_per_step, max_running=4, max_waiting=1),
        )
        self.engine = Engine(
            self.runner, config, clock_s=itertools.count().__next__, draw_seed=itertools.count().__next__
        )
        self.outputs: dict[int, list[TokenOutput]] = {}

    def submit(self, sequence_id: int, prompt: list[int]) -> None:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        self.engine.submit(
            SequenceRequest(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=sampling)
        )

    def step(self, on_look: Callable[[], None] = lambda: None) -> None:
        """One step; ``on_look`` is called the first time that it looks up."""
        calls = iter([on_look])
        self.engine.step(lambda: next(calls, lambda: None)())
        self.collect()

    def collect(self) -> None:
        for output in self.engine.take_outputs():
            self.outputs.setdefault(output.sequence_id, []).append(output)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.check_invariants()

    def abort(self, *sequence_ids: int) -> Callable[[], None]:
        def on_look() -> None:
            for sequence_id in sequence_ids:
                self.engine.abort(sequence_id)

        return on_look

    def tokens(self, sequence_id: int) -> list[int]:
        return [token for output in self.outputs[sequence_id] for token in output.token_ids]

    def ends(self, sequence_id: int) -> list[str]:
        return [output.finish_reason for output in self.outputs[sequence_id] if output.finish_reason]

    @property
    def num_free(self) -> int:
        return self.engine.stats().num_free_blocks


def prompt_of(length: int, salt: int) -> list[int]:
    return [(31 * at + 7 * salt) % 250 for at in range(length)]


def test_an_abort_ends_a_step_that_nobody_else_waits_for() -> None:
    house = House()
    house.submit(1, prompt_of(200, 1))
    house.step(house.abort(1))
    assert house.ends(1) == ["abort"]
    assert house.runner.num_interrupted == 1
    assert not house.engine.has_work
    assert house.num_free == NUM_BLOCKS, "nothing of the step may be found in the cache"
    house.engine.check_invariants()

    # The blocks that the given up step wrote to serve the next ones, however they begin.
    for sequence_id, prompt in ((2, prompt_of(250, 2)), (3, prompt_of(200, 1))):
        house.submit(sequence_id, prompt)
        house.run()
        assert house.tokens(sequence_id) == alone(prompt, 6, VOCAB_SIZE)


def test_an_abort_in_the_second_chunk_keeps_what_the_first_one_computed() -> None:
    house = House()
    prompt = prompt_of(200, 1)
    house.submit(1, prompt)
    house.step()
    house.step(house.abort(1))
    assert house.num_free == NUM_BLOCKS - 128 // 16
    house.submit(2, prompt)
    house.run()
    assert house.outputs[2][-1].cached_prompt_tokens == 128
    assert house.tokens(2) == alone(prompt, 6, VOCAB_SIZE)


def test_blocks_are_free_before_the_step_ends_and_the_others_get_their_tokens() -> None:
    house = House()
    house.submit(1, prompt_of(48, 1))
    house.submit(2, prompt_of(60, 2))
    free: list[int] = []

    def on_look() -> None:
        house.engine.abort(1)
        house.collect()
        assert house.ends(1) == ["abort"]
        free.append(house.num_free)

    house.step(on_look)
    assert free == [NUM_BLOCKS - 4]
    assert house.runner.num_interrupted == 0
    house.submit(3, prompt_of(48, 3))
    house.run()
    assert house.ends(1) == ["abort"]
    assert house.tokens(1) == []
    assert house.tokens(2) == alone(prompt_of(60, 2), 6, VOCAB_SIZE)
    assert house.tokens(3) == alone(prompt_of(48, 3), 6, VOCAB_SIZE)


def test_decodes_beside_a_prompt_whose_reader_left_lose_nothing() -> None:
    house = House()
    house.submit(1, prompt_of(20, 1))
    house.step()
    house.submit(2, prompt_of(90, 2))
    house.step(house.abort(2))
    assert len(house.tokens(1)) == 2
    house.run()
    assert house.tokens(1) == alone(prompt_of(20, 1), 6, VOCAB_SIZE)
    assert house.ends(2) == ["abort"]


def test_when_all_of_a_step_are_aborted_those_who_wait_are_next() -> None:
    house = House()
    house.submit(1, prompt_of(60, 1))
    house.submit(2, prompt_of(60, 2))
    house.step(lambda: (house.abort(1, 2)(), house.submit(3, prompt_of(30, 3)))[0])
    assert house.runner.num_interrupted == 1
    house.run()
    assert house.tokens(3) == alone(prompt_of(30, 3), 6, VOCAB_SIZE)
    assert house.ends(1) == house.ends(2) == ["abort"]


def test_what_is_submitted_and_aborted_during_a_step_is_both() -> None:
    house = House()

    def on_look() -> None:
        house.submit(2, prompt_of(10, 2))
        house.engine.abort(2)
        for sequence_id in range(3, 8):
            house.submit(sequence_id, prompt_of(10, sequence_id))

    house.submit(1, prompt_of(60, 1))
    house.step(on_look)
    assert house.ends(2) == ["abort"]
    assert house.outputs[7][0].refusal == "queue_full"
    house.run()
    for sequence_id in (3, 4, 5, 6):
        assert house.tokens(sequence_id) == alone(prompt_of(10, sequence_id), 6, VOCAB_SIZE)


def test_steps_that_only_decode_do_not_look_up() -> None:
    house = House()
    house.submit(1, prompt_of(20, 1))
    house.run()
    assert house.runner.num_asked == NUM_PARTS


@pytest.mark.parametrize("error", [ValueError("unreadable"), RuntimeError("gone"), ConnectionError("lost")])
def test_what_goes_wrong_while_looking_up_is_not_taken_for_a_failure_of_the_model(error: Exception) -> None:
    def on_look() -> None:
        raise error

    house = House()
    house.submit(1, prompt_of(20, 1))
    with pytest.raises(type(error), match=str(error)):
        house.step(on_look)
    assert house.runner.num_steps == 1


class LatePoisonRunner(PartedRunner):
    """Fails on poisoned prompts after it has looked up."""

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        logits = super().execute(plan, should_stop)
        if any(chunk.token_ids[0] == POISON_TOKEN_ID for chunk in plan.chunks):
            raise RuntimeError("the model cannot take this")
        return logits


def test_a_sequence_ends_once_also_when_it_is_aborted_and_the_model_fails() -> None:
    house = House(LatePoisonRunner())
    house.submit(1, [POISON_TOKEN_ID, *prompt_of(20, 1)])
    house.submit(2, prompt_of(20, 2))
    house.submit(3, [POISON_TOKEN_ID, *prompt_of(20, 3)])
    house.step(house.abort(1))
    house.run()
    assert house.ends(1) == ["abort"]
    assert house.ends(3) == ["error"]
    assert house.tokens(2) == alone(prompt_of(20, 2), 6, VOCAB_SIZE)
