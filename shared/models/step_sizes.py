"""How much a layer works in for one new position, as a model's config tells. Pure.

What transformers' layers hold at their widest place: the residual stream, its norm and what is added to it; then either
queries, keys and values before and after their rotation and the attention's output, or an MLP's gate, its activation,
what it multiplies and the product. A mixture of experts has as many MLPs as a token chooses, and those it always takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MASK_FLAG_BYTES: Final = 1
"""A mask is made of flags, and turned into the element type of the queries."""
_STREAMS: Final = 4
_ROTATED: Final = 2
_MLP_COPIES: Final = 4
_WIDTHS: Final = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_EXPERT_WIDTHS: Final = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED_WIDTHS: Final = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_MLP_FACTOR: Final = 4
"""An MLP whose width the config does not name is four times as wide as the residual stream."""


def activation_items(text_config: Mapping[str, Any]) -> int:
    """Elements that the widest layer holds at once for one new position.

    Args:
        text_config: The decoder's part of `config.json`.
    """
    hidden = _count(text_config, "hidden_size", "n_embd", "d_model")
    return _STREAMS * hidden + max(_attention_items(text_config, hidden), _MLP_COPIES * _mlp_width(text_config, hidden))


def _attention_items(config: Mapping[str, Any], hidden: int) -> int:
    heads = _count(config, "num_attention_heads", "n_head") or 1
    head_dim = _count(config, "head_dim", "qk_head_dim") or hidden // heads
    head_dim = max(head_dim, _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim"))
    # Latent attention spreads its latents to one key and value for each head.
    is_latent = bool(_count(config, "kv_lora_rank"))
    kv_heads = heads if is_latent else _count(config, "num_key_value_heads") or heads
    linear = _count(config, "linear_num_value_heads") * _count(config, "linear_value_head_dim")
    return max(_ROTATED * head_dim * (heads + kv_heads) + head_dim * (heads + kv_heads), 4 * linear)


def _mlp_width(config: Mapping[str, Any], hidden: int) -> int:
    dense = _count(config, *_WIDTHS) or _MLP_FACTOR * hidden
    chosen = _count(config, *_CHOSEN)
    if not chosen:
        return dense
    expert = _count(config, *_EXPERT_WIDTHS) or dense
    always = _count(config, *_SHARED_WIDTHS) or expert * _count(config, "n_shared_experts")
    return max(dense, chosen * expert + always)


def _count(config: Mapping[str, Any], *keys: str) -> int:
    return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), 0)
