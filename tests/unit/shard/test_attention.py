"""Grouped attention on the CPU gives what transformers' own attention gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import DeepseekV32ForCausalLM, Gemma2ForCausalLM, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shard import attention
from shard.attention import ATTENTION, choose_attention, grouped_attention

HEAD_DIM = 16


def module(heads: int, groups: int) -> torch.nn.Module:
    """What attention functions look at of a layer."""
    return cast(torch.nn.Module, SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(14, 2), (8, 1), (4, 4)])
@pytest.mark.parametrize("new_len", [1, 5])
def test_it_equals_transformers(new_len: int, heads: int, groups: int, masked: bool, dtype: torch.dtype) -> None:
    """One position or several, grouped or not, with a mask or without."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, new_len, HEAD_DIM, generator=generator).to(dtype)
    key, value = (torch.randn(1, groups, 40, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
    mask = (torch.rand(1, 1, new_len, 40, generator=generator) > 0.3) if masked else None
    arguments: Any = (module(heads, groups), query, key, value, mask)
    ours, _ = grouped_attention(*arguments, scaling=0.3, sliding_window=None)
    theirs, _ = sdpa_attention_forward(*arguments, scaling=0.3, sliding_window=None)
    assert ours.shape == (1, new_len, heads, HEAD_DIM)
    assert torch.allclose(ours, theirs, atol=1e-5 if dtype is torch.float32 else 2e-2)


def test_keys_and_values_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one position, torch is given as many key heads as there are."""
    seen: list[torch.Size] = []
    original = attention.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.extend((query.shape, key.shape))
        return original(query, key, value, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    key = torch.randn(1, 2, 9, HEAD_DIM)
    grouped_attention(module(14, 2), torch.randn(1, 14, 1, HEAD_DIM), key, key, None)
    assert seen == [torch.Size((1, 2, 7, HEAD_DIM)), key.shape]


def test_a_softcap_is_never_ignored() -> None:
    """It is handed on, and transformers refuses it."""
    key = torch.randn(1, 1, 9, HEAD_DIM)
    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(module(4, 1), torch.randn(1, 4, 1, HEAD_DIM), key, key, None, softcap=30.0)


def test_only_models_that_take_any_attention_get_ours() -> None:
    """A model that cannot use sdpa keeps transformers' choice."""
    assert choose_attention(Qwen2ForCausalLM) == ATTENTION
    assert choose_attention(Gemma2ForCausalLM) is None


def test_a_model_that_asks_for_the_attentions_name_keeps_its_own() -> None:
    """One with an indexer would let an attention that it does not know attend to what the indexer has ruled out."""
    assert choose_attention(DeepseekV32ForCausalLM) is None
