"""Multi-head latent attention (DeepSeek-V2, section 2.1) over the paged latent cache.

Two forms of the same function. In the absorbed one ``W_UK`` multiplies the query and ``W_UV`` the weighted
sum of latents, so that the cache is read as it is. In the expanded one the context's latents are turned into
keys and values once for all queries of a chunk, which costs less as soon as queries are many, but takes
memory for the whole context. So decodes and short chunks use the absorbed form, and a long chunk the expanded
one where its memory is within bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from backend.engine.forward_batch import SingleQueries
from backend.model.config import MlaConfig, ModelConfig
from backend.model.context import LayerCache, StepContext
from backend.model.linear import HeadLinear, Linear, build_linear
from backend.model.placement import Placement
from backend.model.quant import Matrix, concatenate, select_rows, to_float
from backend.model.weights import WeightReader
from kernels.native import NativeLibrary
from kernels.paged_attention import causal_attention, paged_attention
from kernels.paged_mla import gather_latent, paged_mla_decode
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.store_kv import store_kv, store_latent

_BLOCK_SIZE = 64
"""Tokens per block of the short-lived cache that an expanded context is attended through."""

MAX_EXPANDED_BYTES = 4 << 30
"""Of keys and values of an expanded context, in all their copies."""

MAX_SHORT_CHUNK = 256
"""No longer chunk counts as short, whatever the shape."""

_MAX_SCORES = 1 << 25
"""Scores that one call of the absorbed form may hold, in elements."""


class LatentAttention:
    """MLA of one layer. What reads the hidden state is one product: ``[query | rope key | latent]``."""

    def __init__(
        self, config: ModelConfig, mla: MlaConfig, reader: WeightReader, prefix: str, placement: Placement
    ):
        self._mla, self._heads = mla, config.num_heads
        self._scale = config.softmax_scale
        self._is_interleaved = config.rope.is_interleaved
        self._placement = placement
        query, self._q_up, self._q_norm = _read_query(config, mla, reader, prefix, placement)
        kv_down, self._kv_norm = _read_latent(config, mla, reader, prefix, placement)
        self._query_width = int(query.shape[0])
        self._down = build_linear(concatenate([query, kv_down], 0), placement)
        keys, values = _read_expansion(config, mla, reader, prefix)
        num_groups = _count_distinct(values, self._heads)
        self._value = HeadLinear(_first_of_groups(values, self._heads, num_groups), num_groups, placement)
        self._expand_values = build_linear(_first_of_groups(values, self._heads, num_groups), placement)
        self._num_value_groups = num_groups
        self._absorb: HeadLinear | None = None
        if mla.nope_dim:
            self._absorb = HeadLinear(_transposed(keys, self._heads), self._heads, placement)
            self._expand_keys = build_linear(keys, placement)
        width = self._heads * mla.v_dim
        out = reader.matrix(f"{prefix}.o_proj.weight", config.hidden_size, width)
        self._out = build_linear(out, placement)
        self.short_chunk = count_short_chunk(mla, config.num_heads, num_groups)
        # Native kernels read a copy in blocks of their own.
        copies = 1 if placement.native is None else 2
        self._expanded_bytes = copies * 2 * mla.qk_dim * config.num_heads * placement.dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int) -> LayerCache:
        return (self._placement.zeros(num_blocks, block_size, self._mla.cache_width),)

    def __call__(self, x: Tensor, step: StepContext, cache: LayerCache) -> Tensor:
        """``[tokens, hidden]`` to the same; latents and rope keys of the tokens go to the cache."""
        (rows,) = cache
        batch = step.batch
        nope, rotated = self._project(x, step, rows)
        attended = x.new_empty((x.shape[0], self._heads * self._mla.v_dim))
        num_short = step.count_short(self.short_chunk)
        if num_short:
            queries = step.single_queries(num_short)
            attended[queries.tokens] = self.absorbed(nope, rotated, rows, queries)
        start = sum(batch.query_lens[:num_short])
        for sequence in range(num_short, batch.num_sequences):
            chunk = slice(start, start + batch.query_lens[sequence])
            length, start = batch.kv_lens_list[sequence], chunk.stop
            if length * self._expanded_bytes > MAX_EXPANDED_BYTES:
                queries = batch.single_queries(range(sequence, sequence + 1))
                attended[chunk] = self.absorbed(nope, rotated, rows, queries)
            else:
                context = gather_latent(rows, batch.block_tables[sequence], length)
                own_nope = None if nope is None else nope[chunk]
                attended[chunk] = self.expanded(own_nope, rotated[chunk], context)
        return self._out(attended)

    def _project(self, x: Tensor, step: StepContext, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Write the cache rows; queries ``[tokens, heads, nope]`` and rotated ``[tokens, heads, rope]``."""
        mla, native = self._mla, self._placement.native
        down = self._down(x)
        rope_end = self._query_width + mla.rope_width
        query, rope_key = down[:, : self._query_width], down[:, self._query_width : rope_end]
        nope_width = self._heads * mla.nope_dim
        if self._q_up is None:
            self._rotate(down[:, nope_width:rope_end], step)  # queries and key lie side by side
        else:
            if self._q_norm is not None:
                query = rms_norm(query.contiguous(), self._q_norm, mla.latent_norm_eps, native=native)
            query = self._q_up(query)
            self._rotate(query[:, nope_width:], step)
            self._rotate(rope_key, step)
        latent = down[:, rope_end:] if mla.has_kv_a else x
        if self._kv_norm is not None:
            latent = rms_norm(latent.contiguous(), self._kv_norm, mla.latent_norm_eps, native=native)
        store_latent(latent, rope_key, rows, step.batch.slots, native=native)
        nope = query[:, :nope_width].view(len(x), self._heads, -1) if nope_width else None
        return nope, query[:, nope_width:].view(len(x), self._heads, -1)

    def _rotate(self, columns: Tensor, step: StepContext) -> None:
        heads = columns.view(len(columns), -1, self._mla.rope_dim)
        rope(heads, step.cos, step.sin, interleaved=self._is_interleaved, native=self._placement.native)

    def absorbed(self, nope: Tensor | None, rotated: Tensor, rows: Tensor, queries: SingleQueries) -> Tensor:
        """``[queries, heads * v]``; ``nope`` and ``rotated`` are those of the whole batch."""
        tokens = queries.tokens
        latent_query = None
        if self._absorb is not None and nope is not None:
            latent_query = self._absorb(nope[tokens].contiguous())
        at_once = max(_MAX_SCORES // (self._heads * max(queries.longest, 1)), 1)
        summed = [
            paged_mla_decode(
                None if latent_query is None else latent_query[start : start + at_once],
                rotated[tokens][start : start + at_once],
                rows,
                queries.block_tables[start : start + at_once],
                queries.kv_lens[start : start + at_once],
                self._scale,
                rope_groups=self._mla.rope_groups,
                native=self._placement.native,
            )
            for start in range(0, tokens.stop - tokens.start, at_once)
        ]
        return self._value(summed[0] if len(summed) == 1 else torch.cat(summed)).flatten(1)

    def expanded(self, nope: Tensor | None, rotated: Tensor, context: Tensor) -> Tensor:
        """``[queries, heads * v]`` of a chunk: the end of ``context`` ``[kv_len, cache_width]``."""
        mla, length = self._mla, context.shape[0]
        latent = context[:, : mla.kv_lora_rank].contiguous()
        key = context[:, mla.kv_lora_rank :].view(length, mla.rope_groups, -1)
        value = self._expand_values(latent).view(length, self._num_value_groups, -1)
        query = rotated
        if nope is not None or mla.rope_groups != self._num_value_groups:
            key, value = _repeat(key, self._heads), _repeat(value, self._heads)
        if nope is not None:
            key = torch.cat((self._expand_keys(latent).view(length, self._heads, -1), key), dim=2)
            query = torch.cat((nope, rotated), dim=2)
        if self._placement.native is not None:
            return _attend_native(query, key, value, self._scale, self._placement.native).flatten(1)
        # The fused form of scaled_dot_product_attention wants one width for queries, keys and values.
        value = pad(value, (0, max(mla.qk_dim - mla.v_dim, 0)))
        return causal_attention(query, key, value, self._scale)[:, :, : mla.v_dim].flatten(1)


def count_short_chunk(mla: MlaConfig, heads: int, num_value_groups: int) -> int:
    """The longest chunk that takes fewer multiplications in absorbed form, by those for a token of context:

    absorbed, for each query: scores in the latent and the rotated part, and the sum of latents;
    expanded: a key and a value once, then for each query scores and the sum of values.
    """
    scored = mla.kv_lora_rank if mla.nope_dim else 0
    absorbed = heads * (scored + mla.rope_dim + mla.kv_lora_rank)
    expanded = heads * (mla.qk_dim + mla.v_dim)
    expansion = (heads * mla.nope_dim + num_value_groups * mla.v_dim) * mla.kv_lora_rank
    saved = max(absorbed - expanded, 1)
    return min(max(expansion // saved, 1), MAX_SHORT_CHUNK)


def _attend_native(query: Tensor, key: Tensor, value: Tensor, scale: float, native: NativeLibrary) -> Tensor:
    """Causal attention of a chunk over contiguous keys and values, by way of a paged cache of its own."""
    length, heads, dim = key.shape
    blocks = -(-length // _BLOCK_SIZE)
    keys = torch.empty((blocks, heads, dim, _BLOCK_SIZE))
    values = torch.empty((blocks, heads, _BLOCK_SIZE, value.shape[2]))
    store_kv(key, value, keys, values, torch.arange(length), native=native)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    starts = torch.tensor([0, len(query)], dtype=torch.int32)
    kv_lens = torch.tensor([length], dtype=torch.int32)
    return paged_attention(query, keys, values, table, starts, kv_lens, scale, native=native)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """``[tokens, groups, width]`` to ``[tokens, heads, width]``, each group for its run of heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _read_query(
    config: ModelConfig, mla: MlaConfig, reader: WeightReader, prefix: str, placement: Placement
) -> tuple[Matrix, Linear | None, Tensor | None]:
    """What multiplies the hidden state, what multiplies the query latent (if any), and the latent's norm.

    Rows are reordered so that the parts without and with rotation each lie together.
    """
    hidden, rows = config.hidden_size, config.num_heads * mla.qk_dim
    per_head = torch.arange(rows).view(config.num_heads, mla.qk_dim)
    order = torch.cat((per_head[:, : mla.nope_dim].reshape(-1), per_head[:, mla.nope_dim :].reshape(-1)))
    if mla.q_lora_rank is None:
        return select_rows(reader.matrix(f"{prefix}.q_proj.weight", rows, hidden), order), None, None
    up = select_rows(reader.matrix(f"{prefix}.q_b_proj.weight", rows, mla.q_lora_rank), order)
    if not mla.has_q_a:
        return up, None, None
    norm = None
    if mla.has_q_norm:
        norm = reader.vector(f"{prefix}.q_a_layernorm.weight", mla.q_lora_rank)
        norm = placement.put(norm)
    down = reader.matrix(f"{prefix}.q_a_proj.weight", mla.q_lora_rank, hidden)
    return down, build_linear(up, placement), norm


def _read_latent(
    config: ModelConfig, mla: MlaConfig, reader: WeightReader, prefix: str, placement: Placement
) -> tuple[Matrix, Tensor | None]:
    """``kv_a_proj_with_mqa`` with the rope key first, and the latent's norm."""
    latent = mla.kv_lora_rank if mla.has_kv_a else 0
    rows = latent + mla.rope_width
    matrix = reader.matrix(f"{prefix}.kv_a_proj_with_mqa.weight", rows, config.hidden_size)
    order = torch.cat((torch.arange(latent, rows), torch.arange(latent)))
    norm = None
    if mla.has_kv_norm:
        norm = reader.vector(f"{prefix}.kv_a_layernorm.weight", mla.kv_lora_rank)
        norm = placement.put(norm)
    return select_rows(matrix, order), norm


def _read_expansion(
    config: ModelConfig, mla: MlaConfig, reader: WeightReader, prefix: str
) -> tuple[Matrix, Matrix]:
    """``W_UK`` ``[heads * nope, latent]`` and ``W_UV`` ``[heads * v, latent]`` out of ``kv_b_proj``."""
    width = mla.nope_dim + mla.v_dim
    rows = config.num_heads * width
    matrix = reader.matrix(f"{prefix}.kv_b_proj.weight", rows, mla.kv_lora_rank)
    per_head = torch.arange(rows).view(config.num_heads, width)
    keys = select_rows(matrix, per_head[:, : mla.nope_dim].reshape(-1))
    return keys, select_rows(matrix, per_head[:, mla.nope_dim :].reshape(-1))


def _transposed(keys: Matrix, heads: int) -> Tensor:
    """``[heads * nope, latent]`` to ``[heads * latent, nope]``, which multiplies a query when absorbed."""
    dense = to_float(keys)
    return (
        dense.view(heads, -1, dense.shape[1]).transpose(1, 2).reshape(heads * dense.shape[1], -1).contiguous()
    )


def _count_distinct(values: Matrix, heads: int) -> int:
    """How many groups of consecutive heads share one matrix exactly (``heads`` where none do)."""
    per_head = to_float(values).view(heads, -1)
    is_same = (per_head[1:] == per_head[:-1]).all(dim=1).tolist()
    num_groups = 1 + is_same.count(False)
    if heads % num_groups:
        return heads
    size = heads // num_groups
    is_regular = all(same == (head % size != 0) for head, same in enumerate(is_same, start=1))
    return num_groups if is_regular else heads


def _first_of_groups(values: Matrix, heads: int, num_groups: int) -> Matrix:
    rows = torch.arange(values.shape[0]).view(heads, -1)[:: heads // num_groups]
    return select_rows(values, rows.reshape(-1))
