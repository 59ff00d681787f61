from __future__ import annotations

import pytest
import torch

from kernels.native import NativeLibrary
from kernels.packed_linear import packed_embedding, packed_head_linear, packed_linear
from kernels.packed_linear.cases import EDGES, HEAD, ROWS, SMOLLM2, LinearCase
from tests.kernels.poison import assert_close, surrounded

ALL = (*SMOLLM2, *EDGES)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 33, 130])
def test_native_equals_the_reference(case: LinearCase, rows: int, native: NativeLibrary) -> None:
    weight, x = case.weight(), torch.randn(rows, case.in_features)
    assert_close(packed_linear(surrounded(x), weight, native=native), packed_linear(x, weight))


@pytest.mark.parametrize("case", [SMOLLM2[0], SMOLLM2[3], *EDGES], ids=lambda case: case.name)
def test_a_row_has_the_same_bits_in_every_batch(case: LinearCase, native: NativeLibrary) -> None:
    weight, x = case.weight(), torch.randn(max(ROWS), case.in_features)
    alone = torch.cat([packed_linear(x[i : i + 1], weight, native=native) for i in ROWS[:-1]])
    for rows in ROWS:
        together = packed_linear(x[1 : 1 + rows].contiguous(), weight, native=native)
        assert torch.equal(together, alone[:rows])


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.name)
@pytest.mark.parametrize("rows", [1, 5])
def test_accumulating_continues_the_sum(case: LinearCase, rows: int, native: NativeLibrary) -> None:
    weight, x, start = (
        case.weight(),
        torch.randn(rows, case.in_features),
        torch.randn(rows, case.out_features),
    )
    out = surrounded(start)
    assert packed_linear(x, weight, out=out, accumulate=True, native=native) is out
    assert_close(out, start + packed_linear(x, weight))
    assert_close(packed_linear(x, weight, out=start.clone(), accumulate=True), out)


def test_writes_only_its_own_output(native: NativeLibrary) -> None:
    weight, guard = EDGES[1].weight(), torch.full((3, 33), 5.0)
    packed_linear(torch.randn(1, 96), weight, out=guard[1:2], native=native)
    assert torch.equal(guard[0], torch.full((33,), 5.0))
    assert torch.equal(guard[2], torch.full((33,), 5.0))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("tokens", [1, 4, 21])
def test_heads_meet_their_groups_matrix(groups: int, tokens: int, native: NativeLibrary) -> None:
    weight = LinearCase("values", 64 * groups, 576, 4).weight()
    x = torch.randn(tokens, 9, 576)
    result = packed_head_linear(surrounded(x), weight, groups, native=native)
    assert_close(result, packed_head_linear(x, weight, groups))
    first = packed_head_linear(x[:1].contiguous(), weight, groups, native=native)
    assert torch.equal(result[:1], first)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*EDGES, HEAD], ids=lambda case: case.name)
def test_embedding_dequantises_rows_exactly(case: LinearCase, native: NativeLibrary) -> None:
    weight = case.weight()
    ids = torch.tensor([0, case.out_features - 1, 5, 5, 2])
    assert torch.equal(packed_embedding(ids, weight, native=native), packed_embedding(ids, weight))


def test_wrong_tensors_are_named(native: NativeLibrary) -> None:
    weight = EDGES[0].weight()
    with pytest.raises(ValueError, match="x has 31 columns, the weight 32"):
        packed_linear(torch.randn(1, 31), weight)
    with pytest.raises(ValueError, match="x must be a contiguous float32 matrix"):
        packed_linear(torch.randn(2, 64)[:, ::2], weight, native=native)
    with pytest.raises(ValueError, match="out must be"):
        packed_linear(torch.randn(1, 32), weight, out=torch.empty(1, 8), native=native)
    with pytest.raises(ValueError, match="accumulate needs out"):
        packed_linear(torch.randn(1, 32), weight, accumulate=True)
    with pytest.raises(ValueError, match="token_ids must be"):
        packed_embedding(torch.zeros(2, dtype=torch.int32), weight, native=native)
    with pytest.raises(ValueError, match="groups of a weight"):
        packed_head_linear(torch.randn(1, 4, 32), weight, 3)
