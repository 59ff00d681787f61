"""Grouped-query attention over the paged cache (the llama family)."""

from __future__ import annotations

from torch import Tensor

from backend.engine.forward_batch import ForwardBatch
from backend.model.config import ModelConfig
from backend.model.context import LayerCache, StepContext
from backend.model.linear import build_linear
from backend.model.placement import Placement
from backend.model.quant import concatenate
from backend.model.weights import WeightReader
from kernels.paged_attention import paged_attention
from kernels.rope import rope
from kernels.store_kv import store_kv


class GroupedQueryAttention:
    """Queries, keys and values come from one product; rotated keys and values go to the cache."""

    def __init__(self, config: ModelConfig, reader: WeightReader, prefix: str, placement: Placement) -> None:
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._scale = config.softmax_scale
        self._is_interleaved = config.rope.is_interleaved
        self._placement = placement
        hidden, q_rows, kv_rows = config.hidden_size, self._heads * self._dim, self._kv_heads * self._dim
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        parts = [reader.matrix(f"{prefix}.{name}.weight", size, hidden) for name, size in rows.items()]
        self._qkv = build_linear(concatenate(parts, 0), placement)
        self._out = build_linear(reader.matrix(f"{prefix}.o_proj.weight", hidden, q_rows), placement)

    def new_cache(self, num_blocks: int, block_size: int) -> LayerCache:
        keys = self._placement.zeros(num_blocks, self._kv_heads, self._dim, block_size)
        return keys, self._placement.zeros(num_blocks, self._kv_heads, block_size, self._dim)

    def __call__(self, x: Tensor, step: StepContext, cache: LayerCache) -> Tensor:
        """``[tokens, hidden]`` to the same; keys and values of the tokens go to the cache."""
        keys, values = cache
        native = self._placement.native
        tokens = x.shape[0]
        qkv = self._qkv(x)
        rotated = (self._heads + self._kv_heads) * self._dim
        qk = qkv[:, :rotated].view(tokens, -1, self._dim)
        rope(qk, step.cos, step.sin, interleaved=self._is_interleaved, native=native)
        value = qkv[:, rotated:].view(tokens, self._kv_heads, self._dim)
        store_kv(qk[:, self._heads :], value, keys, values, step.batch.slots, native=native)
        attended = self._attend(qk[:, : self._heads], keys, values, step.batch)
        return self._out(attended.reshape(tokens, -1))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch) -> Tensor:
        return paged_attention(
            query,
            keys,
            values,
            batch.block_tables,
            batch.query_starts,
            batch.kv_lens,
            self._scale,
            native=self._placement.native,
        )
