from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig
from backend.engine.engine import MAX_FAILURES_IN_A_ROW, Engine
from backend.engine.kv_size import choose_num_blocks
from backend.engine.messages import SamplingParams, SequenceRequest, TokenOutput
from backend.engine.prefix_cache import block_digest, root_digest
from backend.engine.step import ShouldStop, StepPlan
from tests.support.fake_engine import EOS_TOKEN_ID, POISON_TOKEN_ID, VOCAB_SIZE, FakeRunner
from tests.support.fake_model import alone


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def config_of(*, cache: dict[str, Any] | None = None, **scheduler: Any) -> BackendConfig:
    return BackendConfig(
        replica_id="r0",
        model=ModelSource(path="fake", served_as="fake", max_model_len=256),
        cache=CacheConfig(**{"num_blocks": 64, **(cache or {})}),
        scheduler=SchedulerConfig(
            **{"max_tokens_per_step": 64, "max_running": 8, "max_waiting": 8, **scheduler}
        ),
    )


def engine_of(runner: FakeRunner | None = None, clock: Clock | None = None, **config: Any) -> Engine:
    return Engine(
        runner or FakeRunner(),
        config_of(**config),
        clock_s=clock or Clock(),
        draw_seed=itertools.count(1).__next__,
    )


def request_of(sequence_id: int, prompt: list[int], **sampling: Any) -> SequenceRequest:
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return SequenceRequest(
        sequence_id=sequence_id, prompt_token_ids=prompt, sampling=SamplingParams(**params)
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(EOS_TOKEN_ID) for _ in range(length)]


def run(engine: Engine) -> dict[int, list[TokenOutput]]:
    """Step until idle; outputs by sequence."""
    outputs: dict[int, list[TokenOutput]] = {}
    pending = engine.take_outputs()
    while pending or engine.has_work:
        for output in pending:
            outputs.setdefault(output.sequence_id, []).append(output)
        if engine.has_work:
            engine.step()
        pending = engine.take_outputs()
    engine.check_invariants()
    return outputs


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_greedy_output_is_the_same_cold_warm_chunked_preempted_alone_and_in_a_batch() -> None:
    prompts = [prompt_of(20 + 9 * index, seed=index) for index in range(8)]
    prompts[5] = prompts[4][:40] + prompt_of(20, seed=50)
    expected = [alone(prompt, 90, VOCAB_SIZE) for prompt in prompts]

    one_by_one = engine_of()
    for _ in ("cold", "warm"):
        for index, prompt in enumerate(prompts):
            one_by_one.submit(request_of(index, prompt, max_tokens=90))
            assert tokens_of(run(one_by_one)[index]) == expected[index]
    assert one_by_one.stats().cached_prompt_tokens > 0

    chunked_and_preempted = engine_of(cache={"num_blocks": 20}, max_tokens_per_step=9)
    for index, prompt in enumerate(prompts):
        chunked_and_preempted.submit(request_of(index, prompt, max_tokens=90))
    outputs = run(chunked_and_preempted)
    assert [tokens_of(outputs[index]) for index in range(8)] == expected
    assert chunked_and_preempted.stats().num_preemptions > 0


def test_a_seed_gives_the_same_tokens_preempted_or_not() -> None:
    prompts = [prompt_of(20, seed=index) for index in range(6)]
    answers = []
    for num_blocks in (64, 16):
        engine = engine_of(cache={"num_blocks": num_blocks})
        for index, prompt in enumerate(prompts):
            engine.submit(request_of(index, prompt, max_tokens=40, temperature=4.0, seed=index))
        outputs = run(engine)
        answers.append([tokens_of(outputs[index]) for index in range(6)])
    assert engine.stats().num_preemptions > 0
    assert answers[0] == answers[1]


def test_an_end_of_sequence_token_is_counted_and_named() -> None:
    prompt = next(p for p in map(prompt_of, range(5, 200)) if EOS_TOKEN_ID not in alone(p, 6, VOCAB_SIZE))
    expected = alone(prompt, 6, VOCAB_SIZE)
    runner = FakeRunner()
    engine = engine_of(runner)
    engine.submit(request_of(1, prompt, max_tokens=6, stop_token_ids=(expected[3],)))
    outputs = run(engine)[1]
    assert tokens_of(outputs) == expected[: expected.index(expected[3]) + 1]
    assert outputs[-1].finish_reason == "stop"
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "sentence"),
    [
        ([], {}, "prompt_token_ids: must not be empty"),
        ([1, VOCAB_SIZE], {}, f"prompt_token_ids: ids must be in 0..{VOCAB_SIZE - 1}"),
        ([-1], {}, f"prompt_token_ids: ids must be in 0..{VOCAB_SIZE - 1}"),
        ([1], {"max_tokens": 0}, "max_tokens: must be at least 1"),
        ([1], {"temperature": float("nan")}, "temperature: must be at least 0"),
        ([1], {"temperature": -1.0}, "temperature: must be at least 0"),
        ([1], {"top_p": 0.0}, "top_p: must be over 0 and at most 1"),
        ([1], {"top_k": -1}, "top_k: must be at least 0"),
        ([1], {"min_p": 1.5}, "min_p: must be in 0..1"),
        ([1], {"frequency_penalty": float("inf")}, "frequency_penalty: must be a finite number"),
        ([1], {"presence_penalty": float("nan")}, "presence_penalty: must be a finite number"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty: must be over 0"),
        ([1], {"num_logprobs": -1}, "num_logprobs: must be at least 0"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias: must be finite numbers for token ids"),
    ],
)
def test_what_would_fail_in_a_step_is_refused_before_it(
    prompt: list[int], sampling: dict[str, Any], sentence: str
) -> None:
    engine = engine_of()
    engine.submit(request_of(1, prompt, **sampling))
    (output,) = run(engine)[1]
    assert (output.finish_reason, output.refusal) == ("error", "invalid_request")
    assert output.message.startswith(sentence)
    assert engine.stats().num_refusals == 1


def test_a_prompt_that_is_too_long_is_refused_with_the_known_sentence() -> None:
    engine = engine_of()
    engine.submit(request_of(1, prompt_of(250)))
    (output,) = run(engine)[1]
    assert output.refusal == "context_length_exceeded"
    assert output.message.startswith("This model's maximum context length is 256 tokens.")
    assert engine.stats().num_steps == 0


def test_waiting_has_a_limit_in_time() -> None:
    clock = Clock()
    engine = engine_of(clock=clock, max_running=1, max_queue_wait_s=5.0)
    engine.submit(request_of(1, prompt_of(5), max_tokens=30))
    engine.step()
    clock.now_s += 1
    engine.submit(request_of(2, prompt_of(5)))
    clock.now_s += 4.5
    engine.step()
    assert {output.sequence_id for output in engine.take_outputs()} == {1}
    clock.now_s += 1
    engine.step()
    late = [output for output in engine.take_outputs() if output.sequence_id == 2]
    assert [output.refusal for output in late] == ["queue_timeout"]
    run(engine)


def test_the_wait_for_admission_is_reported() -> None:
    clock = Clock()
    engine = engine_of(clock=clock, max_running=1)
    engine.submit(request_of(1, prompt_of(5), max_tokens=2))
    engine.submit(request_of(2, prompt_of(5), max_tokens=2))
    while engine.has_work:
        clock.now_s += 1
        engine.step()
    waits = {output.sequence_id: output.queue_wait_s for output in engine.take_outputs()}
    assert waits == {1: 1.0, 2: 3.0}


def test_an_abort_reports_what_was_counted_and_frees_at_once() -> None:
    engine = engine_of()
    for sequence_id in (1, 2):
        engine.submit(request_of(sequence_id, prompt_of(40), max_tokens=20, temperature=1.0))
        while not engine.take_outputs():
            engine.step()
    engine.abort(2)
    engine.abort(2)
    engine.abort(99)
    (output,) = engine.take_outputs()
    assert (output.finish_reason, output.cached_prompt_tokens) == ("abort", 32)
    engine.abort(1)
    stats = engine.stats()
    assert (stats.num_running, stats.num_aborts) == (0, 2)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    engine.check_invariants()


def test_one_sequence_that_the_model_cannot_take_fails_alone() -> None:
    engine = engine_of(FakeRunner(["poison"]))
    engine.submit(request_of(1, prompt_of(20, seed=1)))
    engine.step()
    engine.submit(request_of(2, [POISON_TOKEN_ID, 1, 2]))
    engine.submit(request_of(3, prompt_of(20, seed=3)))
    outputs = run(engine)
    assert outputs[2][-1].finish_reason == "error"
    assert outputs[2][-1].message == "the model failed on this sequence"
    for sequence_id in (1, 3):
        expected = alone(prompt_of(20, seed=sequence_id), 8, VOCAB_SIZE)
        assert tokens_of(outputs[sequence_id]) == expected
    assert engine.stats().num_running == 0


def test_a_model_that_fails_on_everyone_ends_the_engine() -> None:
    engine = engine_of(FakeRunner(["poison"]))
    for sequence_id in range(MAX_FAILURES_IN_A_ROW):
        engine.submit(request_of(sequence_id, [POISON_TOKEN_ID]))
    with pytest.raises(RuntimeError, match="cannot take this"):
        engine.step()


class SpoiltRunner(FakeRunner):
    """Gives no numbers for the second row of every step."""

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        logits = super().execute(plan, should_stop)
        if len(logits) > 1:
            logits[1] = torch.nan
        return logits


def test_a_row_that_is_no_number_fails_alone() -> None:
    engine = engine_of(SpoiltRunner())
    engine.submit(request_of(1, prompt_of(20, seed=1)))
    engine.submit(request_of(2, prompt_of(20, seed=2)))
    outputs = run(engine)
    assert tokens_of(outputs[1]) == alone(prompt_of(20, seed=1), 8, VOCAB_SIZE)
    assert tokens_of(outputs[2]) == []
    assert outputs[2][-1].finish_reason == "error"


def test_the_counters_agree_with_the_outputs() -> None:
    engine = engine_of(cache={"num_blocks": 20})
    for index in range(8):
        engine.submit(request_of(index, prompt_of(33, seed=index // 2), max_tokens=20))
    outputs = run(engine)
    stats = engine.stats()
    last = [outputs[index][-1] for index in range(8)]
    assert stats.prompt_tokens == 8 * 33
    assert stats.cached_prompt_tokens == sum(output.cached_prompt_tokens for output in last) == 4 * 32
    assert stats.completion_tokens == sum(len(tokens_of(outputs[index])) for index in range(8))
    assert (stats.num_requests, stats.num_waiting, stats.num_running) == (8, 0, 0)
    assert stats.num_blocks == 20


def test_the_pool_is_sized_from_memory_or_given() -> None:
    share = 1 << 22
    assert choose_num_blocks(CacheConfig(num_blocks=16), 1024, 256, share) == 16
    assert choose_num_blocks(CacheConfig(memory_gib=1.0), 1024, 256, share) == 65536
    assert choose_num_blocks(CacheConfig(), 1024, 256, share) == 256
    with pytest.raises(ValueError, match=r"cache.num_blocks: 15 blocks .* set it to 16 or more"):
        choose_num_blocks(CacheConfig(num_blocks=15), 1024, 256, share)
    with pytest.raises(ValueError, match=r"cache.memory_gib: 0.001 GiB .* set it to 0\.016 or more"):
        choose_num_blocks(CacheConfig(memory_gib=0.001), 1 << 20, 8, share)
    with pytest.raises(ValueError, match=r"cache.memory_gib: 0.00391 GiB .* set it to 0\.016 or more"):
        choose_num_blocks(CacheConfig(), 1 << 20, 8, share)
    with pytest.raises(ValueError, match=r"cache.block_size"):
        choose_num_blocks(CacheConfig(block_size=0), 1024, 256, share)


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        (
            CacheConfig(memory_gib=1e9),
            r"cache.memory_gib: a KV cache of 1,000,000,000.0 GiB is more than the",
        ),
        (
            CacheConfig(num_blocks=10**9),
            r"cache.num_blocks: a KV cache of 15,258.8 GiB is more than the 16.0 ",
        ),
        (CacheConfig(memory_gib=float("inf")), "cache.memory_gib: must be a number over 0, not inf"),
        (CacheConfig(memory_gib=float("nan")), "cache.memory_gib: must be a number over 0, not nan"),
        (CacheConfig(memory_gib=-1.0), "cache.memory_gib: must be a number over 0, not -1"),
    ],
)
def test_a_cache_that_the_device_cannot_hold_is_refused_by_its_key(
    cache: CacheConfig, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        choose_num_blocks(cache, 1024, 256, 1 << 30, 1 << 34)


def test_the_shorter_of_the_two_lengths_counts() -> None:
    assert engine_of().info.max_model_len == 256


def test_the_head_of_the_cached_blocks_is_told_once_and_chains_over_all_of_them() -> None:
    engine = engine_of()
    prompt = prompt_of(50)
    engine.submit(request_of(1, prompt))
    assert [output.cached_head for output in run(engine)[1]] == [b""] * 8

    engine.submit(request_of(2, prompt))
    warm = run(engine)[2]
    head = root_digest(b"")
    for start in (0, 16, 32):
        head = block_digest(head, prompt[start : start + 16])
    assert warm[0].cached_prompt_tokens == 48
    assert [output.cached_head for output in warm] == [head] + [b""] * 7


def test_a_sequence_that_is_stopped_before_its_first_token_tells_the_head_too() -> None:
    engine = engine_of(max_tokens_per_step=8)
    prompt = prompt_of(50)
    engine.submit(request_of(1, prompt[:32]))
    run(engine)
    engine.submit(request_of(2, prompt))
    engine.step()
    engine.abort(2)
    (end,) = engine.take_outputs()
    assert (end.finish_reason, end.cached_prompt_tokens) == ("abort", 32)
    assert end.cached_head == block_digest(block_digest(root_digest(b""), prompt[:16]), prompt[16:32])
