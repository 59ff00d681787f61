"""The tensors of one engine step, built from a StepPlan.

Tokens of all chunks are flattened into one dimension, the shortest chunks first: decodes, of one token, and
others that attention can treat with them as one batch. The rows of the logits are in the plan's own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from backend.engine.step import ScheduledChunk, StepPlan


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """``tokens`` of a batch as sequences of one query each: ``block_tables`` ``[tokens, B]`` and ``kv_lens``
    ``[tokens]``, both int32; ``longest`` is the largest of the latter, or more."""

    tokens: slice
    block_tables: Tensor
    kv_lens: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the model reads in one step.

    Sequences ``0 .. num_decodes-1`` have one query token each; the others have more, in ascending order. With
    ``T`` tokens, ``S`` sequences and ``R`` rows of logits:

    token_ids, positions, slots:
        ``[T]`` int64; a slot is ``block * block_size + offset``, the row of the KV cache a token writes.
    query_starts:
        ``[S + 1]`` int32; tokens of sequence ``s`` are ``query_starts[s] .. query_starts[s+1]-1``.
    kv_lens:
        ``[S]`` int32; tokens of the sequence that have KV once this step is done (context + queries).
    block_tables:
        ``[S, B]`` int32, padded with block 0.
    logits_rows:
        ``[R]`` int64; the tokens whose logits are wanted, in the plan's order.
    query_lens, kv_lens_list:
        the same lengths as Python integers, so that no kernel has to read a tensor back.
    first_rows:
        the row of the first token of each chunk, in the plan's order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    logits_rows: Tensor
    num_decodes: int
    query_lens: tuple[int, ...]
    kv_lens_list: tuple[int, ...]
    first_rows: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    def single_queries(self, sequences: range) -> SingleQueries:
        """Tokens of neighbouring sequences, each as a query of its own that sees what comes before it."""
        first = sum(self.query_lens[: sequences.start])
        lengths = self.query_lens[sequences.start : sequences.stop]
        tokens = slice(first, first + sum(lengths))
        tables = self.block_tables[sequences.start : sequences.stop]
        if len(lengths) < sum(lengths):
            repeats = torch.tensor(lengths, device=tables.device)
            tables = tables.repeat_interleave(repeats, dim=0, output_size=sum(lengths))
        longest = max(self.kv_lens_list[sequences.start : sequences.stop], default=0)
        return SingleQueries(tokens, tables, (self.positions[tokens] + 1).to(torch.int32), longest)


def build_forward_batch(plan: StepPlan, block_size: int, device: torch.device) -> ForwardBatch:
    """Flatten ``plan`` into tensors on ``device``.

    Raises:
        ValueError: when the plan is empty or a block table does not cover its chunk.
    """
    if not plan.chunks:
        raise ValueError("a step plan needs at least one chunk")
    order = sorted(range(len(plan.chunks)), key=lambda index: len(plan.chunks[index].token_ids))
    chunks = [plan.chunks[index] for index in order]
    lengths = tuple(len(chunk.token_ids) for chunk in chunks)
    starts = [0, *accumulate(lengths)]
    kv_lens = tuple(chunk.start + length for chunk, length in zip(chunks, lengths, strict=True))
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for chunk, end in zip(chunks, kv_lens, strict=True):
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, end))
        slots.extend(_slots(chunk, end, block_size))
    first_row = {index: starts[place] for place, index in enumerate(order)}
    last_row = {index: starts[place + 1] - 1 for place, index in enumerate(order)}
    rows = [
        row
        for index, chunk in enumerate(plan.chunks)
        for row in range(last_row[index] + 1 - chunk.num_rows, last_row[index] + 1)
    ]

    def ints(values: list[int] | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=ints(token_ids, torch.int64),
        positions=ints(positions, torch.int64),
        slots=ints(slots, torch.int64),
        query_starts=ints(starts, torch.int32),
        kv_lens=ints(kv_lens, torch.int32),
        block_tables=_block_tables(chunks, kv_lens, block_size).to(device, non_blocking=True),
        logits_rows=ints(rows, torch.int64),
        num_decodes=sum(length == 1 for length in lengths),
        query_lens=lengths,
        kv_lens_list=kv_lens,
        first_rows=tuple(first_row[index] for index in range(len(order))),
    )


def _slots(chunk: ScheduledChunk, end: int, block_size: int) -> list[int]:
    table = chunk.block_table
    if not chunk.token_ids or len(table) * block_size < end:
        raise ValueError(
            f"sequence {chunk.sequence_id}: {len(table)} blocks of {block_size} do not hold tokens "
            f"{chunk.start}..{end - 1}"
        )
    if end - chunk.start == 1:
        return [table[chunk.start // block_size] * block_size + chunk.start % block_size]
    return [table[at // block_size] * block_size + at % block_size for at in range(chunk.start, end)]


def _block_tables(chunks: list[ScheduledChunk], kv_lens: tuple[int, ...], block_size: int) -> Tensor:
    widths = [-(-length // block_size) for length in kv_lens]
    width = max(widths)
    rows = [
        [*chunk.block_table[:used], *([0] * (width - used))]
        for chunk, used in zip(chunks, widths, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32)
