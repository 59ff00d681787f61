"""From a plan to tensors: decodes first, slots from block tables, logits in the plan's order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.forward_batch import build_forward_batch
from backend.engine.step import ScheduledChunk, StepPlan

CPU = torch.device("cpu")


def test_short_chunks_come_first_and_rows_keep_the_plans_order() -> None:
    plan = StepPlan(
        (
            ScheduledChunk(1, [10, 11, 12], 3, [7, 2], True),
            ScheduledChunk(2, [20], 4, [5, 9], True),
            ScheduledChunk(3, [30, 31], 0, [8], False),
        )
    )
    batch = build_forward_batch(plan, 4, CPU)
    assert batch.num_decodes == 1
    assert batch.num_tokens == 6
    assert batch.token_ids.tolist() == [20, 30, 31, 10, 11, 12]
    assert batch.positions.tolist() == [4, 0, 1, 3, 4, 5]
    assert batch.slots.tolist() == [36, 32, 33, 31, 8, 9]
    assert batch.query_starts.tolist() == [0, 1, 3, 6]
    assert batch.kv_lens.tolist() == [5, 2, 6]
    assert batch.block_tables.tolist() == [[5, 9], [8, 0], [7, 2]]
    assert batch.logits_rows.tolist() == [5, 0]
    assert batch.first_rows == (3, 0, 1)


def test_tokens_of_short_chunks_are_queries_of_their_own() -> None:
    plan = StepPlan(
        (
            ScheduledChunk(1, [10, 11, 12], 3, [7, 2], True),
            ScheduledChunk(2, [20], 4, [5, 9], True),
            ScheduledChunk(3, [30, 31], 0, [8], False),
        )
    )
    batch = build_forward_batch(plan, 4, CPU)
    queries = batch.single_queries(range(2))
    assert queries.tokens == slice(0, 3)
    assert queries.block_tables.tolist() == [[5, 9], [8, 0], [8, 0]]
    assert (queries.kv_lens.tolist(), queries.kv_lens.dtype) == ([5, 1, 2], torch.int32)
    assert queries.longest == 5
    last = batch.single_queries(range(2, 3))
    assert (last.tokens, last.kv_lens.tolist(), last.longest) == (slice(3, 6), [4, 5, 6], 6)
    none = batch.single_queries(range(0))
    assert (none.tokens, none.block_tables.shape, none.longest) == (slice(0, 0), (0, 2), 0)


def test_a_plan_that_computes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one chunk"):
        build_forward_batch(StepPlan(()), 4, CPU)
    with pytest.raises(ValueError, match=r"sequence 1: 1 blocks of 4 do not hold tokens 3\.\.4"):
        build_forward_batch(StepPlan((ScheduledChunk(1, [1, 2], 3, [0], True),)), 4, CPU)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_every_token_keeps_its_place(shapes: list[tuple[int, int, bool]], block_size: int) -> None:
    chunks = tuple(
        ScheduledChunk(
            index,
            [100 * index + at for at in range(length)],
            start,
            [50 * index + block for block in range(-(-(start + length) // block_size) + 1)],
            wanted,
        )
        for index, (length, start, wanted) in enumerate(shapes)
    )
    batch = build_forward_batch(StepPlan(chunks), block_size, CPU)
    seen = dict(
        zip(
            batch.token_ids.tolist(),
            zip(batch.positions.tolist(), batch.slots.tolist(), strict=True),
            strict=True,
        )
    )
    for chunk in chunks:
        for at, token in enumerate(chunk.token_ids, start=chunk.start):
            assert seen[token] == (at, chunk.block_table[at // block_size] * block_size + at % block_size)
    last = [chunk.token_ids[-1] for chunk in chunks if chunk.needs_logits]
    assert batch.token_ids[batch.logits_rows].tolist() == last
    assert list(batch.query_lens) == sorted(batch.query_lens)
