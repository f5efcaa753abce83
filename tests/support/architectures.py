"""Every causal language model that the installed transformers maps, as a tiny config that runs in milliseconds.

Nothing here is a list of models: the library's own mapping says what there is, and a config is shrunk by what its
fields are called. `OVERRIDES` holds what shrinking by name cannot know, where sizes must agree with each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS = 6
VOCAB_SIZE = 99
WINDOW = 8
"""Positions of a sliding window or a chunk: short enough that a test decodes across its edge."""

SIZES: Mapping[str, int] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # the same by older names
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 32,
    "ffn_dim": 40,
    "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 16,
    "dense_intermediate_size": 40,
    "prefix_dense_intermediate_size": 40,
    "intermediate_size_mlp": 40,
    "dff": 40,
    "dim_ff": 40,
    "dim_head": 8,
    "num_kv_heads": 2,
    "kv_channels": 8,
    "attention_hidden_size": 32,
    "attention_head_dim": 16,
    "rotary_dim": 4,
    # mixtures of experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "zero_expert_num": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 2,
    "num_dense_layers": 2,
    "router_hidden_size": 16,
    # windows
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "attention_window_size": WINDOW,
    "local_attention": WINDOW,
    "window_size": WINDOW,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 8,
    "index_topk": 6,
    # linear attention and state space
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "n_mamba_heads": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "num_heads": 8,
    "lru_width": 32,
    # several residual streams, per-layer embeddings
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8,
    "hc_lowrank": 8,
    "query_pre_attn_scalar": 8,
}
"""What a field of this name becomes, if the config has it and gives it a number."""

FILLED = frozenset({"head_dim", "num_key_value_heads"})
"""Fields that get their size even where the default config leaves them open."""
LATENT = {"num_key_value_heads": SIZES["num_attention_heads"], "head_dim": SIZES["qk_rope_head_dim"], "qk_head_dim": 12}
"""Latent attention has a key for each query head, and rotates only a part of it."""
ENCODER_HINT = "is_decoder"


def causal_model_types() -> list[str]:
    """Every model type of the library's causal mapping, in its order."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrink_layer_types(kinds: Sequence[Any], length: int = NUM_LAYERS) -> list[Any]:
    """Few layers that still hold every kind: the first kind twice as often, each run at least two long at first."""
    distinct = list(dict.fromkeys(kinds))
    if len(distinct) == 1:
        return distinct * length
    if len(distinct) == 2:
        first, second = distinct
        return ([first, first, second] * math.ceil(length / 3))[:length]
    return (distinct * math.ceil(length / len(distinct)))[:length]


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of this type, a few thousand parameters large."""
    others = OTHER_PARTS.get(model_type, {})
    default = CONFIG_MAPPING[model_type](**others if "text_config" in others else {})
    text = default.get_text_config(decoder=True)
    if default.is_encoder_decoder or getattr(text, "num_hidden_layers", None) is None:
        return default
    fields = {**shrunk_fields(text), **OVERRIDES.get(text.model_type, {})}
    if text is default:
        return type(default)(**others, **fields)
    name = next(name for name, value in vars(default).items() if value is text)
    return type(default)(**{**others, name: {**fields, **others.get(name, {})}})


def shrunk_fields(config: PretrainedConfig) -> dict[str, Any]:
    """What to build a small config of the same class with."""
    num_layers = config.num_hidden_layers
    fields: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in values.items():
        own = config.attribute_map.get(name, name)
        if isinstance(value, bool):
            fields |= {ENCODER_HINT: True} if name == ENCODER_HINT else {}
        elif isinstance(value, int) or (value is None and name in FILLED):
            known = next((SIZES[known] for known in names_of(config, own) if known in SIZES), None)
            fields |= {} if known is None else {name: known}
        elif isinstance(value, list) and len(value) == num_layers:
            fields[name] = _shrink_list(name, value)
    return fields | (LATENT if "kv_lora_rank" in fields else {})


def _shrink_list(name: str, values: Sequence[Any]) -> list[Any]:
    """One entry for each layer that is left."""
    if isinstance(values[0], str):
        return shrink_layer_types(values)
    return [SIZES[name]] * NUM_LAYERS if name in SIZES else list(values[:NUM_LAYERS])


def names_of(config: PretrainedConfig, own: str) -> list[str]:
    """The field's own name, and the standard ones that stand for it."""
    return [own, *(standard for standard, name in config.attribute_map.items() if name == own)]


_LAYERS = range(NUM_LAYERS)
_SLIDING_HEADS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4}
_INKLING = _SLIDING_HEADS | {"rel_extent": WINDOW, "log_scaling_n_floor": 16, "unpadded_vocab_size": VOCAB_SIZE}
_GEMMA_SHARED = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_PER_LAYER = {
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 200,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "heads_per_ngram": 2,
}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [2, 5]},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 40, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dory": {"n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "max_window_layers": 3},
    "dots3_note_text": {
        "head_dim": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "gemma3n_text": _GEMMA_SHARED,
    "gemma4_text": _GEMMA_SHARED | {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING | {"n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": _INKLING
    | {
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 3},
    "moshi": {"sliding_window": 512},  # beyond its window the library's own steps differ from its own whole pass
    "qwen4_exp_text": _INDEXER | _PER_LAYER,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32], "attention_head_size": 8},
    "roc_bert": {
        "shape_embed_dim": 8,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 20,
        "initializer_range": 0.1,  # its embeddings are made of three, mapped to one, and would hardly tell tokens apart
    },
    "trocr": {"decoder_ffn_dim": 40},
    "xlnet": {"d_inner": 40, "d_head": 8},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4},
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_headdim": 32,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""By the type of the text config: sizes that depend on each other, and what the default config leaves open."""

_TINY_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_TINY_AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_blocks": 2,
    "num_attention_heads": 4,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 32,
    "bias_max_distance": 20,
}
_ALL_SHARED = {"num_hidden_layers": NUM_LAYERS, "num_kv_shared_layers": NUM_LAYERS}
_NO_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

OTHER_PARTS: Mapping[str, Mapping[str, Any]] = {
    "dots3_note": {"vision_config": {"adapter_out_dim": 32}, "audio_config": {"adapter_out_dim": 32}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_PER_LAYER, **_ALL_SHARED}},
    "git": {"vision_config": _TINY_VISION},
    "phi4_multimodal": {
        "vision_config": {**_TINY_VISION, "crop_size": 28},
        "audio_config": _TINY_AUDIO,
    },
}
"""By model type: fields of a larger model that must agree with its text part, or that its text part is built with."""
