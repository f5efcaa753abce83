"""What each layer keeps of a session, and where a model may be cut, as its config tells. Pure.

Each kind of layer keeps what transformers' cache of that kind keeps. What a config does not name is taken for full
attention, which keeps the most; a node measures its own once it has loaded (`kv_bytes_per_token`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.models.facts import SlotFacts

_LINEAR = ("linear_attention", "mamba")
_WINDOWED = ("sliding_attention", "chunked_attention")


def read_slots(text_config: Mapping[str, Any], num_layers: int, item_bytes: int) -> list[SlotFacts]:
    """What every layer keeps.

    Args:
        text_config: The decoder's part of `config.json`.
        num_layers: How many decoder layers there are.
        item_bytes: Bytes of an element of the cache.
    """
    shared = _count(text_config, "num_kv_shared_layers")
    kinds = _kinds(text_config, num_layers)
    owners = [_slot(text_config, kind, item_bytes) for kind in kinds[: num_layers - shared]]
    return [*owners, *[SlotFacts()] * shared]


def read_forbidden_cuts(text_config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Boundaries between a layer that uses another's keys and values, and that other layer.

    The last `num_kv_shared_layers` layers use those of the last layer before them of the same kind.
    """
    first_user = num_layers - _count(text_config, "num_kv_shared_layers")
    kinds = _kinds(text_config, num_layers)
    forbidden: set[int] = set()
    for user in range(first_user, num_layers):
        sources = [layer for layer in range(first_user) if kinds[layer] == kinds[user]]
        if sources:
            forbidden.update(range(sources[-1] + 1, user + 1))
    return frozenset(forbidden)


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    listed = config.get("layer_types")
    if isinstance(listed, list) and len(listed) == num_layers:
        return [str(kind) for kind in listed]
    windowed = _count(config, "sliding_window") and config.get("use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * num_layers


def _slot(config: Mapping[str, Any], kind: str, item_bytes: int) -> SlotFacts:
    if kind in _LINEAR and (state := _linear_state_items(config)):
        return SlotFacts(state_bytes=state * item_bytes)
    window = _count(config, "sliding_window") or _count(config, "attention_chunk_size")
    return SlotFacts(
        bytes_per_token=_items_per_token(config) * item_bytes,
        tokens_max=window if kind in _WINDOWED and window else None,
    )


def _items_per_token(config: Mapping[str, Any]) -> int:
    """Elements of one position: compressed latents (MLA), or a key and a value for each K/V head."""
    latent = _count(config, "kv_lora_rank")
    if latent:
        return latent + _count(config, "qk_rope_head_dim")
    heads = _count(config, "num_attention_heads", "n_head") or 1
    head_dim = _count(config, "head_dim") or _count(config, "hidden_size", "n_embd", "d_model") // heads
    kv_heads = _count(config, "num_key_value_heads") or (1 if config.get("multi_query") else heads)
    return 2 * kv_heads * head_dim


def _linear_state_items(config: Mapping[str, Any]) -> int:
    """Elements of a gated delta layer's recurrent state and convolution; 0 where the config has other names."""
    key_dim, value_dim = _count(config, "linear_key_head_dim"), _count(config, "linear_value_head_dim")
    key_heads, value_heads = _count(config, "linear_num_key_heads"), _count(config, "linear_num_value_heads")
    convolved = 2 * key_heads * key_dim + value_heads * value_dim
    return value_heads * key_dim * value_dim + convolved * _count(config, "linear_conv_kernel_dim")


def _count(config: Mapping[str, Any], *keys: str) -> int:
    return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), 0)
