"""paged_attention and paged_mla."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.native import NativeLibrary
from kernels.paged_attention import causal_attention, paged_attention
from kernels.paged_attention.cases import CASES, AttentionCase, AttentionInputs
from kernels.paged_mla import gather_latent, paged_mla_decode
from kernels.paged_mla.cases import CASES as MLA_CASES
from kernels.paged_mla.cases import MlaCase
from tests.kernels.poison import assert_close, surrounded


def run(inputs: AttentionInputs, native: NativeLibrary | None) -> torch.Tensor:
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return paged_attention(**fields, native=native)


def by_hand(inputs: AttentionInputs, token: int, head: int) -> torch.Tensor:
    """One query's attention from the definition, in float64."""
    sequence = int(torch.searchsorted(inputs.query_starts, token, right=True)) - 1
    seen = int(inputs.kv_lens[sequence]) - (int(inputs.query_starts[sequence + 1]) - 1 - token)
    _, kv_heads, _, size = inputs.key_cache.shape
    kv_head = head * kv_heads // inputs.query.shape[1]
    places = [(int(inputs.block_tables[sequence, j // size]), j % size) for j in range(seen)]
    keys = torch.stack([inputs.key_cache[block, kv_head, :, at] for block, at in places]).double()
    values = torch.stack([inputs.value_cache[block, kv_head, at] for block, at in places]).double()
    weights = torch.softmax(keys @ inputs.query[token, head].double() * inputs.scale, dim=0)
    return (weights @ values).float()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_native_equals_the_reference(case: AttentionCase, native: NativeLibrary) -> None:
    inputs = case.inputs()
    assert_close(run(dataclasses.replace(inputs, query=surrounded(inputs.query)), native), run(inputs, None))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_follows_the_definition(case: AttentionCase) -> None:
    inputs = case.inputs()
    result = run(inputs, None)
    for token in {0, inputs.query.shape[0] // 2, inputs.query.shape[0] - 1}:
        for head in (0, case.heads - 1):
            assert_close(result[token, head], by_hand(inputs, token, head))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(
    case: AttentionCase, native: NativeLibrary
) -> None:
    """Every query alone, as a decode over its own context, against the mixed batch."""
    inputs = case.inputs()
    together = run(inputs, native)
    starts, lengths = inputs.query_starts.tolist(), inputs.kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        for token in range(starts[sequence], starts[sequence + 1]):
            alone = dataclasses.replace(
                inputs,
                query=inputs.query[token : token + 1],
                block_tables=inputs.block_tables[sequence : sequence + 1],
                query_starts=torch.tensor([0, 1], dtype=torch.int32),
                kv_lens=torch.tensor([length - (starts[sequence + 1] - 1 - token)], dtype=torch.int32),
            )
            assert torch.equal(run(alone, native)[0], together[token])


def test_threads_do_not_change_bits(library_path: object) -> None:
    inputs = CASES[4].inputs()
    results = [run(inputs, NativeLibrary(library_path, threads)) for threads in (1, 2, 3)]  # type: ignore[arg-type]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_strided_queries_and_values_wider_than_keys(native: NativeLibrary) -> None:
    inputs = CASES[6].inputs()
    tokens, heads, dim = inputs.query.shape
    fused = torch.full((tokens, heads * dim + 10), torch.nan)
    fused[:, 3 : 3 + heads * dim] = inputs.query.flatten(1)
    strided = dataclasses.replace(inputs, query=fused[:, 3 : 3 + heads * dim].view(tokens, heads, dim))
    assert torch.equal(run(strided, native), run(inputs, native))


def test_huge_scores_stay_finite(native: NativeLibrary) -> None:
    inputs = CASES[4].inputs()
    loud = dataclasses.replace(inputs, query=inputs.query * 1e4)
    assert_close(run(loud, native), run(loud, None), rtol=1e-3, atol=1e-3)


def test_causal_attention_offsets_the_diagonal() -> None:
    query, key, value = torch.randn(3, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 24)
    result = causal_attention(query, key, value, 0.25)
    for row in range(3):
        last = causal_attention(query[row : row + 1], key[: 5 + row], value[: 5 + row], 0.25)
        assert_close(result[row : row + 1], last)


def test_shapes_the_native_form_cannot_take_are_named(native: NativeLibrary) -> None:
    inputs = AttentionCase("small blocks", 2, 1, 8, 32, 8, ((1, 9),)).inputs()
    with pytest.raises(ValueError, match="block_size 8 must be a multiple of 16"):
        run(inputs, native)
    with pytest.raises(ValueError, match="do not fit"):
        run(dataclasses.replace(inputs, query=inputs.query[..., :4]), None)


@pytest.mark.parametrize("case", MLA_CASES, ids=lambda case: case.name)
def test_mla_native_equals_the_reference(case: MlaCase, native: NativeLibrary) -> None:
    inputs = case.inputs()
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    expected = paged_mla_decode(**fields, rope_groups=case.rope_groups)
    fields["query_rope"] = surrounded(inputs.query_rope)
    result = paged_mla_decode(**fields, rope_groups=case.rope_groups, native=native)
    assert_close(result, expected)
    for row in range(len(case.lengths)):
        one = slice(row, row + 1)
        alone = paged_mla_decode(
            None if inputs.query_latent is None else inputs.query_latent[one],
            inputs.query_rope[one],
            inputs.cache,
            inputs.block_tables[one],
            inputs.kv_lens[one],
            inputs.scale,
            rope_groups=case.rope_groups,
            native=native,
        )
        assert torch.equal(alone[0], result[row])


def test_mla_is_attention_over_latents() -> None:
    """With one rope group, absorbed decode is attention with keys (latent, rope) and values latent."""
    case = MLA_CASES[2]
    inputs = case.inputs()
    assert inputs.query_latent is not None
    result = paged_mla_decode(
        inputs.query_latent,
        inputs.query_rope,
        inputs.cache,
        inputs.block_tables,
        inputs.kv_lens,
        inputs.scale,
    )
    for row, length in enumerate(case.lengths):
        keys = gather_latent(inputs.cache, inputs.block_tables[row], length)[:, None]
        query = torch.cat((inputs.query_latent[row], inputs.query_rope[row]), dim=-1)[None]
        expected = causal_attention(query, keys, keys[..., : case.latent], inputs.scale)
        assert_close(result[row], expected[0])


def test_mla_widths_are_checked(native: NativeLibrary) -> None:
    inputs = MlaCase("narrow", 2, 40, 8, 1, False, 16, (3,)).inputs()
    with pytest.raises(ValueError, match="must be multiples of 32"):
        paged_mla_decode(
            None, inputs.query_rope, inputs.cache, inputs.block_tables, inputs.kv_lens, 1.0, native=native
        )
    with pytest.raises(ValueError, match="does not fit 2 rope groups"):
        paged_mla_decode(
            None, torch.zeros(1, 2, 32), inputs.cache, inputs.block_tables, inputs.kv_lens, 1.0, rope_groups=2
        )
