"""Tiny random-weight models with a real chat tokenizer, for tests that need no trained weights.

Each kind stands for a way of caching: `qwen2` (full attention, tied head), `llama` (untied head),
`gemma3` (sliding windows beside full attention), `qwen3_next` (linear attention beside full).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3NextConfig,
)

KINDS = ("qwen2", "llama", "gemma3", "qwen3_next")
NUM_LAYERS = 6
SLIDING_WINDOW = 8

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The mesh serves a model that no one machine can run alone.",
    "Ein Knoten fällt aus, und der Satz geht weiter. Wie schön!",
    "你好,世界。今天天气很好。",
    "😀 🎉 emoji are four bytes each",
    "def add(a, b):\n    return a + b\n",
] * 4

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}


def build_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 400 entries and save it with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    return fast


def tiny_config(kind: str, vocab_size: int) -> PretrainedConfig:
    """A config of the kind, small enough to run in milliseconds."""
    common = {**_SIZES, "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "qwen2":
        return Qwen2Config(**common, tie_word_embeddings=True)
    if kind == "llama":
        return LlamaConfig(**common, tie_word_embeddings=False)
    if kind == "gemma3":
        layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * (NUM_LAYERS // 3)
        return Gemma3TextConfig(
            **common, sliding_window=SLIDING_WINDOW, layer_types=layer_types, query_pre_attn_scalar=8
        )
    if kind == "qwen3_next":
        return Qwen3NextConfig(
            **common,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * (NUM_LAYERS // 3),
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")


def build_tiny_model(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a Hugging Face folder: config, float32 safetensors, tokenizer, chat template.

    The projections are scaled up from the usual initialization, so that the residual stream is made of
    what attention and MLP add: logits are far apart, and tokens depend on the history, not on the last
    token alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(folder)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(tiny_config(kind, len(tokenizer)), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "conv" not in name and "embed" not in name:
                    parameter.mul_(10.0)
    finally:
        torch.set_rng_state(generator_state)
    model.generation_config = GenerationConfig(eos_token_id=[2], pad_token_id=0)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"]
    return folder
