"""Names that a ``config.json`` of the DeepSeek-V3 family may hold.

What is not here is refused: a field that nobody knows may change what the model computes.
"""

from __future__ import annotations

from backend.model.fields import Fields

_HONOURED = """
    attention_bias embergate eos_token_id first_k_dense_replace hidden_act hidden_size intermediate_size
    kv_lora_rank latent_norm_eps max_position_embeddings model_type moe_intermediate_size moe_layer_freq
    n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok
    num_hidden_layers num_nextn_predict_layers pretraining_tp q_lora_rank qk_nope_head_dim
    qk_rope_head_dim quantization_config rms_norm_eps rope_interleave rope_parameters rope_scaling
    rope_theta routed_scaling_factor scoring_func tie_word_embeddings topk_group topk_method v_head_dim
    vocab_size
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
    torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache
"""

_MODEL = frozenset((_HONOURED + " " + _DERIVED + " " + _TRAINING + _BOOKKEEPING).split())

_AROUND_TEXT = """
    architectures auto_map bos_token_id dtype eos_token_id ignore_index media_placeholder_token_id
    model_type pad_token_id quantization_config text_config tie_word_embeddings torch_dtype
    transformers_version use_unified_vision_chunk video_placeholder vision_config
"""

_WRAPPER = frozenset(_AROUND_TEXT.split())


def refuse_unknown_fields(fields: Fields, *, is_wrapper: bool = False) -> None:
    """Refuse a configuration with a field that is neither honoured nor known to change nothing.

    Args:
        fields: the model's own fields.
        is_wrapper: whether they are those around a ``text_config``.

    Raises:
        UnsupportedModelError: naming the first such field.
    """
    unknown = fields.raw.keys() - (_WRAPPER if is_wrapper else _MODEL)
    if unknown:
        raise fields.unsupported(min(unknown), "unknown, so it may ask for what this engine does not do")
