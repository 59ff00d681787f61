"""The shape of a vision tower, read from the ``vision_config`` of a ``config.json``.

As with the language model, a field is honoured or refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.model.fields import Fields

_HONOURED = """
    init_pos_emb_height init_pos_emb_time init_pos_emb_width merge_kernel_size merge_type mm_hidden_size
    mm_projector_type patch_size pos_emb_type projector_hidden_act projector_ln_eps text_hidden_size
    video_attn_type vt_hidden_size vt_intermediate_size vt_num_attention_heads vt_num_hidden_layers
"""
_BOOKKEEPING = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures dtype model_type
    torch_dtype transformers_version
"""
_KNOWN = frozenset((_HONOURED + _BOOKKEEPING).split())


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """MoonViT and its projector.

    ``grid_height`` and ``grid_width`` are the learned positions, which are stretched to each image;
    ``max_frames`` the instants that one item may have. ``merge_size`` squared patches become one token of
    ``out_size`` columns.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    grid_height: int
    grid_width: int
    max_frames: int
    merge_size: int
    projector_eps: float
    out_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Columns of the patches of one token together."""
        return self.hidden_size * self.merge_size**2


def parse_vision_config(fields: Fields, text_hidden_size: int) -> VisionConfig:
    """Read a ``vision_config``.

    Args:
        fields: the section.
        text_hidden_size: columns of the language model's embeddings.

    Raises:
        ModelLoadError: naming the field that is missing, of the wrong type, or not honoured.
    """
    if unknown := fields.raw.keys() - _KNOWN:
        raise fields.unsupported(min(unknown), "unknown, so it may ask for what this engine does not do")
    fields.expect("merge_type", "sd2_tpool", default="sd2_tpool")
    fields.expect("mm_projector_type", "patchmerger", default="patchmerger")
    fields.expect("pos_emb_type", "divided_fixed", default="divided_fixed")
    fields.expect("video_attn_type", "spatial_temporal", default="spatial_temporal")
    fields.expect("projector_hidden_act", "gelu", default="gelu")
    hidden, heads = fields.size("vt_hidden_size"), fields.size("vt_num_attention_heads")
    if hidden % (4 * heads):
        raise fields.error("vt_num_attention_heads", f"{hidden} columns are no {heads} heads of whole fours")
    fields.expect("mm_hidden_size", hidden, default=hidden)
    fields.expect("text_hidden_size", text_hidden_size, default=text_hidden_size)
    merge = fields.raw.get("merge_kernel_size", [2, 2])
    if not (isinstance(merge, list) and len(merge) == 2 and merge[0] == merge[1] and merge[0] in range(1, 9)):
        raise fields.unsupported("merge_kernel_size", f"{merge!r} is not supported, only squares like [2, 2]")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=fields.size("vt_intermediate_size"),
        num_layers=fields.size("vt_num_hidden_layers"),
        num_heads=heads,
        patch_size=fields.size("patch_size", default=14),
        grid_height=fields.size("init_pos_emb_height", default=64),
        grid_width=fields.size("init_pos_emb_width", default=64),
        max_frames=fields.size("init_pos_emb_time", default=4),
        merge_size=int(merge[0]),
        projector_eps=fields.number("projector_ln_eps", default=1e-5),
        out_size=text_hidden_size,
    )
