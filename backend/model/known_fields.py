"""Names that a ``config.json`` may hold, by family.

What is not here is refused: a field that nobody knows may change what the model computes.
"""

from __future__ import annotations

from typing import Literal

from backend.model.fields import Fields

_OF_ALL = """
    attention_bias embergate eos_token_id hidden_act hidden_size intermediate_size max_position_embeddings
    model_type num_attention_heads num_hidden_layers pretraining_tp quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
"""

_OF_LLAMA = "head_dim is_llama_config mlp_bias num_key_value_heads rope_interleaved"

_OF_DEEPSEEK = """
    first_k_dense_replace kv_lora_rank latent_norm_eps moe_intermediate_size moe_layer_freq n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers q_lora_rank
    qk_nope_head_dim qk_rope_head_dim rope_interleave routed_scaling_factor scoring_func topk_group
    topk_method v_head_dim
"""

# Follow from other fields, or mean nothing to latent attention.
_DERIVED = "head_dim num_key_value_heads qk_head_dim"

_TRAINING = "attention_dropout aux_loss_alpha ep_size initializer_range seq_aux"

# Bookkeeping of the library that wrote the file, and its defaults for generating text, which a request or
# the catalog states here.
_BOOKKEEPING = """
    _name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    is_decoder is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p use_bfloat16 use_cache
"""

_LLAMA = frozenset((_OF_ALL + _OF_LLAMA + " " + _TRAINING + _BOOKKEEPING).split())
_DEEPSEEK = frozenset((_OF_ALL + _OF_DEEPSEEK + _DERIVED + " " + _TRAINING + _BOOKKEEPING).split())

_AROUND_TEXT = """
    architectures auto_map bos_token_id dtype eos_token_id ignore_index media_placeholder_token_id
    model_type pad_token_id quantization_config text_config tie_word_embeddings torch_dtype
    transformers_version use_unified_vision_chunk video_placeholder vision_config
"""

_ROPE = """
    attention_factor beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings
    partial_rotary_factor rope_theta rope_type truncate type
"""

Place = Literal["llama", "deepseek_v3", "wrapper", "rope"]
"""Where fields stand: at the top of a family's file, around a ``text_config``, among those of the rotary
embedding."""

_KNOWN: dict[Place, frozenset[str]] = {
    "llama": _LLAMA,
    "deepseek_v3": _DEEPSEEK,
    "wrapper": frozenset(_AROUND_TEXT.split()),
    "rope": frozenset(_ROPE.split()),
}


def refuse_unknown_fields(fields: Fields, place: Place) -> None:
    """Refuse a configuration with a field that is neither honoured nor known to change nothing.

    Raises:
        UnsupportedModelError: naming the first such field.
    """
    unknown = fields.raw.keys() - _KNOWN[place]
    if unknown:
        raise fields.unsupported(min(unknown), "unknown, so it may ask for what this engine does not do")
