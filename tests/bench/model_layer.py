"""One MoE layer with random weights in a checkpoint's form: as large as the real one, without files.

Of the experts only some are there; the router chooses among all of them, and a chosen one that is not there
is stood in for by one that is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from backend.engine.forward_batch import ForwardBatch, build_forward_batch
from backend.engine.step import ScheduledChunk, StepPlan
from backend.model.config import ModelConfig
from backend.model.context import LayerCache, StepContext
from backend.model.mla import LatentAttention
from backend.model.moe import Router, SparseMoeMlp
from backend.model.placement import Placement
from backend.model.rope import RopeTable
from backend.model.weights import WeightReader
from kernels.paged_mla import gather_latent
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.store_kv import store_latent

BLOCK_SIZE = 16
Form = Literal["int4", "float32"]
"""What routed experts are stored as; everything else is float32, as quantised checkpoints leave it wide."""


class RandomWeights:
    """A source that makes up a tensor when it is read, so that none is held twice."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], form: Form) -> None:
        self._shapes = dict(shapes)
        for name in list(shapes) if form == "int4" else []:
            if ".mlp.experts." in name:
                rows, columns = self._shapes.pop(name)
                self._shapes[f"{name}_packed"] = (rows, columns // 8)
                self._shapes[f"{name}_scale"] = (rows, columns // 32)
                self._shapes[f"{name}_shape"] = (rows, columns)
        self._rng = torch.Generator().manual_seed(0)

    @property
    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def place_of(self, name: str) -> str:
        return f"made up: {name}"

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("_shape"):
            return torch.tensor(shape, dtype=torch.int32)
        if name.endswith("_packed"):
            return torch.randint(-(2**31), 2**31, shape, generator=self._rng, dtype=torch.int32)
        if name.endswith("_scale"):
            return torch.full(shape, 0.004, dtype=torch.bfloat16)
        spread = 1.0 if len(shape) == 1 else 2 * (3 / shape[-1]) ** 0.5
        return torch.rand(shape, generator=self._rng).sub_(0.5).mul_(spread)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer, and what it multiplies (floating-point operations) for the batch at hand."""

    name: str
    run: Callable[[], object]
    num_flops: int = 0


class Layer:
    """Attention, router, experts, shared expert and norms of one layer."""

    def __init__(self, config: ModelConfig, num_loaded: int, form: Form, placement: Placement) -> None:
        assert config.mla is not None
        assert config.moe is not None
        self.config, self._mla, self._moe = config, config.mla, config.moe
        self._placement = placement
        reader = WeightReader(RandomWeights(_shapes(config, num_loaded), form))
        self._attention = LatentAttention(config, config.mla, reader, "self_attn", placement)
        self._router = Router(config, config.moe, reader, "router", placement)
        top_k = min(config.moe.num_experts_per_token, num_loaded)
        loaded = replace(config.moe, num_experts=num_loaded, num_experts_per_token=top_k)
        self._mlp = SparseMoeMlp(config, loaded, reader, "layer.mlp", placement)
        self._top_k, self._num_loaded = top_k, num_loaded
        self._norm = torch.rand(config.hidden_size)

    def parts(self, num_sequences: int, num_queries: int, context: int, table: RopeTable) -> list[Part]:
        """What can be timed on a batch of so many sequences, each with so many new tokens at the end of
        ``context`` tokens."""
        mla, native = self._mla, self._placement.native
        batch, cache = self._batch(num_sequences, num_queries, context)
        step = StepContext(batch, *table.at(batch.positions))
        tokens = batch.num_tokens
        x, residual = torch.randn(2, tokens, self.config.hidden_size).unbind()
        nope, rotated = self._attention._project(x, step, cache[0])
        queries = batch.single_queries(range(num_sequences))
        heads = torch.randn(tokens, self.config.num_heads + 1, mla.rope_dim)
        latent, rope_key = torch.randn(tokens, mla.kv_lora_rank), torch.randn(tokens, mla.rope_dim)
        attended = torch.randn(tokens, self.config.num_heads * mla.v_dim)
        weights = torch.rand(tokens, self._top_k)
        chosen = torch.stack([torch.randperm(self._num_loaded)[: self._top_k] for _ in range(tokens)]).int()

        def expanded() -> None:
            for sequence in range(num_sequences):
                chunk = slice(sequence * num_queries, (sequence + 1) * num_queries)
                rows = gather_latent(cache[0], batch.block_tables[sequence], context)
                self._attention.expanded(None if nope is None else nope[chunk], rotated[chunk], rows)

        flops = self._flops(tokens, num_sequences, context)
        return [
            Part("norms (2)", lambda: [add_rms_norm(x, residual, self._norm, 1e-5, native=native)] * 2),
            Part(
                "MLA projections, rope, store", lambda: self._attention._project(x, step, cache[0]), flops[0]
            ),
            Part(
                "  of it latent norms",
                lambda: rms_norm(latent, self._norm[: mla.kv_lora_rank], 1e-6, native=native),
            ),
            Part("  of it rope", lambda: rope(heads, step.cos, step.sin, interleaved=True, native=native)),
            Part(
                "  of it store", lambda: store_latent(latent, rope_key, cache[0], batch.slots, native=native)
            ),
            Part(
                "MLA absorbed",
                lambda: self._attention.absorbed(nope, rotated, cache[0], queries),
                flops[1],
            ),
            Part("MLA naive (expanded)", expanded, flops[2]),
            Part("MLA output projection", lambda: self._attention._out(attended), flops[3]),
            Part("router", lambda: self._router.choose(x), flops[4]),
            Part("experts", lambda: self._mlp._routed(x, weights, chosen), flops[5]),
            Part("shared expert", lambda: self._mlp._shared and self._mlp._shared(x), flops[6]),
        ]

    def chosen_form(self, num_queries: int) -> str:
        """The form of MLA that the engine takes for a chunk of so many tokens."""
        return "absorbed" if num_queries <= max(self._attention.short_chunk, 1) else "naive (expanded)"

    def _batch(self, num_sequences: int, num_queries: int, context: int) -> tuple[ForwardBatch, LayerCache]:
        blocks = -(-context // BLOCK_SIZE)
        cache = self._attention.new_cache(num_sequences * blocks, BLOCK_SIZE)
        cache[0].normal_()
        chunks = tuple(
            ScheduledChunk(
                index,
                [1] * num_queries,
                context - num_queries,
                range(index * blocks, (index + 1) * blocks),
                True,
            )
            for index in range(num_sequences)
        )
        return build_forward_batch(StepPlan(chunks), BLOCK_SIZE, self._placement.device), cache

    def _flops(self, tokens: int, num_sequences: int, context: int) -> list[int]:
        config, mla, moe = self.config, self._mla, self._moe
        heads, hidden, latent = config.num_heads, config.hidden_size, mla.kv_lora_rank
        query = hidden * heads * mla.qk_dim
        if mla.q_lora_rank is not None:
            query = mla.q_lora_rank * (hidden + heads * mla.qk_dim)
        seen = tokens * context
        absorbed = heads * (seen * (2 * latent + mla.rope_dim) + tokens * latent * (mla.nope_dim + mla.v_dim))
        expansion = num_sequences * context * latent * heads * (mla.nope_dim + mla.v_dim)
        return [
            2 * part
            for part in (
                tokens * (query + hidden * mla.cache_width),
                absorbed,
                expansion + seen * heads * (mla.qk_dim + mla.v_dim),
                tokens * heads * mla.v_dim * hidden,
                tokens * hidden * moe.num_experts,
                3 * tokens * self._top_k * hidden * moe.expert_dim,
                3 * tokens * hidden * moe.shared_dim,
            )
        ]


def _shapes(config: ModelConfig, num_loaded: int) -> dict[str, tuple[int, ...]]:
    mla, moe, hidden, heads = config.mla, config.moe, config.hidden_size, config.num_heads
    assert mla is not None
    assert moe is not None
    attention: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (mla.cache_width, hidden),
        "kv_a_layernorm": (mla.kv_lora_rank,),
        "kv_b_proj": (heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
        "o_proj": (hidden, heads * mla.v_dim),
    }
    if mla.q_lora_rank is None:
        attention["q_proj"] = (heads * mla.qk_dim, hidden)
    else:
        attention |= {"q_a_proj": (mla.q_lora_rank, hidden), "q_a_layernorm": (mla.q_lora_rank,)}
        attention["q_b_proj"] = (heads * mla.qk_dim, mla.q_lora_rank)
    shapes = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    for prefix, count in (("router", moe.num_experts), ("layer.mlp", num_loaded)):
        shapes[f"{prefix}.gate.weight"] = (count, hidden)
        shapes[f"{prefix}.gate.e_score_correction_bias"] = (count,)
    widths = {f"layer.mlp.experts.{expert}": moe.expert_dim for expert in range(num_loaded)}
    for name, width in (widths | {"layer.mlp.shared_experts": moe.shared_dim}).items():
        shapes |= {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
        shapes[f"{name}.down_proj.weight"] = (hidden, width)
    return shapes
