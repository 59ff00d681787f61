"""What a model is: its shape and its arithmetic, read from ``config.json``.

Whatever a file asks for is either honoured or refused by name. Fields that change nothing at inference
(dropout, initialiser ranges, training bookkeeping) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

from backend.model.fields import Fields
from backend.model.known_fields import refuse_unknown_fields
from backend.model.quant_config import QuantConfig, parse_quant
from backend.model.vision_config import VisionConfig, parse_vision_config

Family = Literal["llama", "deepseek_v3"]

EXTENSION_FORMAT = 1
"""Version of the ``embergate`` section of a ``config.json``; another one is refused."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: ``cos_sin_factor`` multiplies the rotary table, ``softmax_factor`` the softmax scale."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    cos_sin_factor: float
    softmax_factor: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of ``dim`` columns, in pairs (0, 1), (2, 3).. when interleaved, else (0, dim/2).."""

    dim: int
    theta: float
    is_interleaved: bool
    yarn: YarnScaling | None = None


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention.

    ``rope_groups`` is an extension: the rope part of the key holds that many heads of ``rope_dim`` columns,
    all with the same table, and query head ``h`` reads key head ``h * rope_groups // num_heads``. DeepSeek's
    own form is 1. ``latent_norm_eps`` is not the model's eps: DeepSeek's code uses 1e-6 there.
    The ``has_*`` flags are false for factors that a checkpoint declares to be the identity and does not
    store.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    latent_norm_eps: float
    rope_groups: int = 1
    has_q_a: bool = True
    has_q_norm: bool = True
    has_kv_a: bool = True
    has_kv_norm: bool = True

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def rope_width(self) -> int:
        """Columns of a cache row that hold rotated keys."""
        return self.rope_groups * self.rope_dim

    @property
    def cache_width(self) -> int:
        """Elements of one token's cache row: latent, then rotated keys."""
        return self.kv_lora_rank + self.rope_width


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts with DeepSeek-V3's router (sigmoid scores, bias for choice only, limited groups)."""

    num_experts: int
    num_experts_per_token: int
    expert_dim: int
    shared_dim: int
    num_groups: int
    num_chosen_groups: int
    routed_scaling_factor: float
    is_normalised: bool
    num_dense_layers: int

    @property
    def chooses_all(self) -> bool:
        return self.num_experts_per_token == self.num_experts


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model.

    ``quant`` says how matrices that are not plain are stored. ``num_next_token_layers`` are
    multi-token-prediction layers after the last; they are not loaded. ``vision``: the checkpoint has a
    vision tower beside the language model that the other fields describe.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    has_tied_head: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    num_next_token_layers: int = 0
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    quant: QuantConfig | None = None
    vision: VisionConfig | None = None

    @property
    def softmax_scale(self) -> float:
        width = self.mla.qk_dim if self.mla else self.head_dim
        factor = self.rope.yarn.softmax_factor if self.rope.yarn else 1.0
        return float(width**-0.5) * factor

    @property
    def kv_row_width(self) -> int:
        """Elements that one token adds to one layer's cache."""
        return self.mla.cache_width if self.mla else 2 * self.num_kv_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.num_dense_layers


_FAMILIES: Mapping[str, Family] = {
    "llama": "llama",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}


_WITH_VISION = "kimi_k25"
"""The model type of a language model with a vision tower; the former stands in ``text_config``."""


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a decoded ``config.json``.

    Args:
        raw: its content.
        source: the file's path, for error messages.

    Raises:
        ModelLoadError: naming the field that is missing, of the wrong type, or not honoured.
    """
    fields = Fields(raw, source)
    model_type = fields.text("model_type")
    if model_type == _WITH_VISION:
        return _parse_with_vision(fields)
    if "vision_config" in raw or "text_config" in raw:
        raise fields.unsupported("model_type", f"{model_type!r} with a vision tower is not supported")
    family = _FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted([*_FAMILIES, _WITH_VISION]))
        raise fields.unsupported("model_type", f"{model_type!r} is not supported; known are {known}")
    return _parse_family(fields, family)


def _parse_with_vision(fields: Fields) -> ModelConfig:
    refuse_unknown_fields(fields, "wrapper")
    fields.expect("use_unified_vision_chunk", True, default=True)
    text = fields.section("text_config")
    if not text.raw:
        raise fields.error("text_config", "missing")
    model_type = text.text("model_type")
    if _FAMILIES.get(model_type) != "deepseek_v3":
        raise text.unsupported("model_type", f"{model_type!r} is not supported inside {_WITH_VISION}")
    fields.expect("tie_word_embeddings", text.flag("tie_word_embeddings", default=False), default=False)
    outer = {name: fields.raw[name] for name in ("eos_token_id", "quantization_config") if name in fields.raw}
    if "quantization_config" in outer and "quantization_config" in text.raw:
        raise fields.error("quantization_config", "stands in text_config too")
    inner = Fields({**text.raw, **outer}, fields.source, text.path)
    model = _parse_family(inner, "deepseek_v3")
    vision = fields.section("vision_config")
    if not vision.raw:
        return model
    return replace(model, vision=parse_vision_config(vision, model.hidden_size))


def _parse_family(fields: Fields, family: Family) -> ModelConfig:
    fields.expect("hidden_act", "silu", default="silu")
    fields.expect("attention_bias", False, default=False)
    fields.expect("pretraining_tp", 1, default=1)
    refuse_unknown_fields(fields, family)
    return _parse_llama(fields) if family == "llama" else _parse_deepseek(fields)


def _parse_llama(fields: Fields) -> ModelConfig:
    fields.expect("mlp_bias", False, default=False)
    fields.expect("rope_interleaved", False, default=False)
    fields.expect("is_llama_config", True, default=True)
    _parse_extension(fields)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide {heads} attention heads")
    return ModelConfig(
        family="llama",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        rope=_parse_rope(fields, head_dim, is_interleaved=False),
        **_shared_fields(fields),
    )


def _parse_deepseek(fields: Fields) -> ModelConfig:
    fields.expect("scoring_func", "sigmoid", default="sigmoid")
    fields.expect("topk_method", "noaux_tc", default="noaux_tc")
    fields.expect("moe_layer_freq", 1, default=1)
    mla = _parse_mla(fields)
    heads = fields.size("num_attention_heads")
    if heads % mla.rope_groups:
        raise fields.section("embergate").error(
            "rope_groups", f"{mla.rope_groups} does not divide {heads} heads"
        )
    is_interleaved = fields.flag("rope_interleave", default=True)
    return ModelConfig(
        family="deepseek_v3",
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=mla.qk_dim,
        intermediate_size=fields.size("intermediate_size"),
        rope=_parse_rope(fields, mla.rope_dim, is_interleaved=is_interleaved),
        num_next_token_layers=fields.size("num_nextn_predict_layers", default=0, minimum=0),
        mla=mla,
        moe=_parse_moe(fields),
        **_shared_fields(fields),
    )


def _shared_fields(fields: Fields) -> dict[str, Any]:
    return {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        "num_layers": fields.size("num_hidden_layers"),
        "rms_norm_eps": fields.number("rms_norm_eps", minimum=0.0),
        "max_position_embeddings": fields.size("max_position_embeddings"),
        "has_tied_head": fields.flag("tie_word_embeddings", default=False),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "quant": parse_quant(fields),
    }


def _parse_extension(fields: Fields) -> Fields:
    """The ``embergate`` section: what this checkpoint does that the stock architecture does not."""
    extension = fields.section("embergate")
    extension.expect("format", EXTENSION_FORMAT, default=EXTENSION_FORMAT)
    unknown = extension.raw.keys() - {"format", "form", "rope_groups", "identity"}
    if unknown:
        raise extension.error(min(unknown), "unknown")
    return extension


_IDENTITIES = ("q_a_proj", "q_a_layernorm", "kv_a_proj_latent", "kv_a_layernorm")


def _parse_mla(fields: Fields) -> MlaConfig:
    extension = _parse_extension(fields)
    identity = extension.raw.get("identity", [])
    for name in identity:
        if name not in _IDENTITIES:
            raise extension.error("identity", f"{name!r} is not one of {', '.join(_IDENTITIES)}")
    if ("q_a_proj" in identity) != ("q_a_layernorm" in identity):
        raise extension.error("identity", "q_a_proj and q_a_layernorm must be named together")
    hidden, q_rank = fields.size("hidden_size"), fields.raw.get("q_lora_rank")
    kv_rank = fields.size("kv_lora_rank")
    if "q_a_proj" in identity and q_rank != hidden:
        raise fields.error(
            "q_lora_rank", f"{q_rank} must be hidden_size ({hidden}) when q_a_proj is the identity"
        )
    if "kv_a_proj_latent" in identity and kv_rank != hidden:
        raise fields.error(
            "kv_lora_rank", f"{kv_rank} must be hidden_size ({hidden}) when kv_a_proj is the identity"
        )
    return MlaConfig(
        q_lora_rank=None if q_rank is None else fields.size("q_lora_rank"),
        kv_lora_rank=kv_rank,
        nope_dim=fields.size("qk_nope_head_dim", minimum=0),
        rope_dim=fields.size("qk_rope_head_dim"),
        v_dim=fields.size("v_head_dim"),
        latent_norm_eps=fields.number("latent_norm_eps", default=1e-6, minimum=0.0),
        rope_groups=extension.size("rope_groups", default=1),
        has_q_a=q_rank is not None and "q_a_proj" not in identity,
        has_q_norm=q_rank is not None and "q_a_layernorm" not in identity,
        has_kv_a="kv_a_proj_latent" not in identity,
        has_kv_norm="kv_a_layernorm" not in identity,
    )


def _parse_moe(fields: Fields) -> MoeConfig | None:
    num_experts = fields.raw.get("n_routed_experts")
    if num_experts is None:
        return None
    experts, chosen = fields.size("n_routed_experts"), fields.size("num_experts_per_tok")
    groups = fields.size("n_group", default=1)
    chosen_groups = fields.size("topk_group", default=1)
    if chosen_groups > groups:
        raise fields.error("topk_group", f"{chosen_groups} is more than the {groups} groups of n_group")
    if experts % groups:
        raise fields.error("n_group", f"{groups} does not divide {experts} experts")
    if groups > 1 and experts // groups < 2:
        raise fields.error("n_group", "group scores are sums of two experts, so a group needs at least two")
    if not chosen <= chosen_groups * (experts // groups):
        raise fields.error("num_experts_per_tok", f"{chosen} is more than {chosen_groups} groups hold")
    width = fields.size("moe_intermediate_size")
    return MoeConfig(
        num_experts=experts,
        num_experts_per_token=chosen,
        expert_dim=width,
        shared_dim=width * fields.size("n_shared_experts", default=0, minimum=0),
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
        is_normalised=fields.flag("norm_topk_prob", default=True),
        num_dense_layers=fields.size("first_k_dense_replace", default=0, minimum=0),
    )


def _parse_rope(fields: Fields, dim: int, *, is_interleaved: bool) -> RopeConfig:
    scaling = fields.section("rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling")
    raw = scaling.raw
    theta = (scaling if "rope_theta" in raw else fields).number("rope_theta", default=10000.0, minimum=1.0)
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise scaling.unsupported("rope_type", f"{kind!r} is not supported; known are default, yarn")
    refuse_unknown_fields(scaling, "rope")
    scaling.expect("partial_rotary_factor", 1.0, default=1.0)
    if kind == "default":
        return RopeConfig(dim=dim, theta=theta, is_interleaved=is_interleaved)
    return RopeConfig(dim=dim, theta=theta, is_interleaved=is_interleaved, yarn=_parse_yarn(scaling))


def _parse_yarn(scaling: Fields) -> YarnScaling:
    scaling.expect("truncate", True, default=True)
    scaling.expect("attention_factor", None, default=None)
    factor = scaling.number("factor", minimum=1.0)
    mscale, all_dim = scaling.number("mscale", default=0.0), scaling.number("mscale_all_dim", default=0.0)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=scaling.size("original_max_position_embeddings"),
        beta_fast=scaling.number("beta_fast", default=32.0, minimum=0.0),
        beta_slow=scaling.number("beta_slow", default=1.0, minimum=0.0),
        cos_sin_factor=magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0),
        softmax_factor=magnitude(all_dim) ** 2 if all_dim else 1.0,
    )
