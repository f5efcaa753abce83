"""Tiny models that differ from the usual: what a stage must find out about its layers by itself.

==================  ==========================================================================
gpt2                learned positions: nothing lies beyond the table
falcon              layers return tuples
openai-gpt          its forward takes no cache, and its layers return lists
recurrent_gemma     accepts a cache and keeps its state elsewhere
jamba               its state-space layers continue from a cache by one position only
gemma3n             four residual streams, ids in every layer, keys and values shared between layers
==================  ==========================================================================
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3nTextConfig,
    GPT2Config,
    JambaConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
)

VOCAB_SIZE = 99
POSITIONS_MAX = 64

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT_SIZES = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": POSITIONS_MAX}


def odd_config(kind: str) -> PretrainedConfig:
    """A config of the kind, small enough to run in milliseconds."""
    match kind:
        case "gpt2":
            return GPT2Config(**_GPT_SIZES)
        case "openai-gpt":
            return OpenAIGPTConfig(**_GPT_SIZES)
        case "falcon":
            return FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
        case "recurrent_gemma":
            return RecurrentGemmaConfig(**_SIZES, lru_width=32, attention_window_size=8)
        case "jamba":
            experts = {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2}
            state_space = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
            return JambaConfig(**_SIZES, **experts, **state_space, attn_layer_period=2, attn_layer_offset=1)
        case "gemma3n":
            sizes = {**_SIZES, "num_hidden_layers": 6, "intermediate_size": [40] * 6, "sliding_window": 8}
            per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 4}
            kinds = ["sliding_attention", "full_attention"] * 3
            sparsity = [0.0] * 6
            return Gemma3nTextConfig(
                **sizes,
                **per_layer,
                layer_types=kinds,
                num_kv_shared_layers=2,
                activation_sparsity_pattern=sparsity,
            )
    raise ValueError(f"no odd model {kind!r}")


def build_odd_model(kind: str, folder: Path) -> Path:
    """Write a folder with config and float32 safetensors."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(odd_config(kind), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
        model.save_pretrained(folder)
    finally:
        torch.set_rng_state(state)
    return folder
