"""A stage's cache: absolute slots, its length, its bytes, and what a failed step leaves."""

from __future__ import annotations

import pytest
import torch
from transformers import PretrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from shard.kv_layers import AbsentLayer, GrowingLayer, WindowLayer
from shard.session_cache import StageCache
from shared.layers import LayerRange
from tests.support.tiny_models import KINDS, SLIDING_WINDOW, tiny_config

KEYS = torch.ones(1, 2, 3, 8)
WINDOW_MOVED = 10 * SLIDING_WINDOW
"""Positions after which a window has left its first ones for good."""


def kinds_of(cache: StageCache) -> list[type]:
    """What stands in each slot."""
    return [type(slot) for slot in cache.slots.layers]


def config(kind: str) -> PretrainedConfig:
    """A config of six layers."""
    return tiny_config(kind, 100)


def test_slots_keep_absolute_indices() -> None:
    """Those outside the range are there, and hold nothing."""
    cache = StageCache(config("llama"), LayerRange(2, 4))
    assert kinds_of(cache) == [AbsentLayer, AbsentLayer, GrowingLayer, GrowingLayer, AbsentLayer, AbsentLayer]


def test_a_layer_that_never_runs_holds_nothing() -> None:
    """Cross-attention to images, say, when there is only text; its slot is as empty as a fresh one."""
    cache = StageCache(config("llama"), LayerRange(2, 5), idle={3})
    assert kinds_of(cache)[2:5] == [GrowingLayer, AbsentLayer, GrowingLayer]
    assert not cache.slots.layers[3].is_initialized


def test_what_a_model_keeps_in_an_absent_slot_is_lost_with_a_failed_step() -> None:
    """Positions that all layers look at are kept in one slot, wherever its layer is: they cannot be put back."""
    cache = StageCache(config("llama"), LayerRange(0, 1))
    cache.abort(0)
    assert not cache.damaged
    cache.slots.layers[3].positions = torch.arange(4)
    cache.abort(0)
    assert cache.damaged


def test_each_kind_of_layer_gets_its_kind_of_slot() -> None:
    """Sliding windows are bounded; linear attention stays transformers' own."""
    assert (
        kinds_of(StageCache(config("gemma3"), LayerRange(0, 3)))
        == [WindowLayer] * 2 + [GrowingLayer] + [AbsentLayer] * 3
    )
    hybrid = kinds_of(StageCache(config("qwen3_next"), LayerRange(1, 4)))
    assert hybrid[:4] == [AbsentLayer, LinearAttentionLayer, GrowingLayer, LinearAttentionLayer]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [LayerRange(0, 6), LayerRange(1, 2), LayerRange(2, 3), LayerRange(3, 5)], ids=str)
def test_the_model_can_ask_any_slot_for_its_past(kind: str, layers: LayerRange) -> None:
    """Also a stage that holds no slot that counts: its length stands beside the slots."""
    cache = StageCache(config(kind), layers)
    cache.length = 5
    slots = cache.begin()
    absent = [i for i in range(6) if i not in layers]
    assert all(slots.get_seq_length(i) == 5 and slots.get_mask_sizes(2, i) == (7, 0) for i in absent)


def test_nbytes_counts_what_is_allocated() -> None:
    """Nothing at first, then whole buffers, and opaque states as they are."""
    cache = StageCache(config("qwen3_next"), LayerRange(1, 3))
    assert cache.nbytes == 0
    cache.slots.update(KEYS, KEYS, 2)
    attention = cache.nbytes
    assert attention >= 2 * KEYS.nbytes
    cache.slots.update_conv_state(torch.ones(1, 6, 4), 1)
    cache.slots.update_recurrent_state(torch.ones(1, 2, 8, 8), 1)
    assert cache.nbytes == attention + 4 * (6 * 4 + 2 * 8 * 8)
    assert cache.bytes_per_position() == 2 * KEYS.nbytes // 3


def test_a_failed_step_is_taken_back() -> None:
    """Layers that had already appended forget it."""
    cache = StageCache(config("llama"), LayerRange(0, 2))
    for i in (0, 1):
        cache.begin().update(KEYS, KEYS, i)
    cache.commit(3)
    cache.begin().update(KEYS, KEYS, 0)
    cache.abort(3)
    assert not cache.damaged
    assert [slot.get_seq_length() for slot in cache.slots.layers[:2]] == [3, 3]


def test_what_cannot_be_taken_back_is_damaged() -> None:
    """A recurrent state has no way back, nor has a window that has moved on."""
    linear = StageCache(config("qwen3_next"), LayerRange(0, 1))
    linear.abort(0)
    assert not linear.damaged
    linear.slots.update_conv_state(torch.ones(1, 6, 4), 0)
    linear.abort(0)
    assert linear.damaged
    window = StageCache(config("gemma3"), LayerRange(0, 1))
    long = torch.ones(1, 2, WINDOW_MOVED, 8)
    window.slots.update(long, long, 0)
    window.abort(0)
    assert window.damaged


def test_a_slot_that_was_passed_over_is_found() -> None:
    """By its absolute index."""
    cache = StageCache(config("llama"), LayerRange(1, 3))
    cache.slots.update(KEYS, KEYS, 1)
    cache.commit(3)
    assert cache.unused_slot() == 2
    cache.slots.update(KEYS, KEYS, 2)
    assert cache.unused_slot() is None


@pytest.mark.parametrize(
    ("kind", "layers", "rewinds"),
    [
        ("llama", LayerRange(0, 6), True),
        ("gemma3", LayerRange(0, 6), True),
        ("qwen3_next", LayerRange(0, 6), False),
        ("qwen3_next", LayerRange(0, 2), False),
        ("qwen3_next", LayerRange(2, 3), True),
    ],
    ids=str,
)
def test_what_can_go_back_is_known_before_anything_is_held(kind: str, layers: LayerRange, rewinds: bool) -> None:
    """It depends on the layers of the range alone: the full attention of a hybrid can, its states cannot."""
    assert StageCache(config(kind), layers).rewinds == rewinds


def test_going_back_is_all_or_nothing() -> None:
    """Where one slot cannot, none does; where all can, all do, and the length with them."""
    cache = StageCache(config("gemma3"), LayerRange(1, 3))
    for length in (WINDOW_MOVED, 1):
        states = torch.ones(1, 2, length, 8)
        for i in (1, 2):
            cache.begin().update(states, states, i)
        cache.commit(length)
    assert not cache.can_rewind(3)
    with pytest.raises(ValueError, match=f"{WINDOW_MOVED + 1} positions cannot go back to 3"):
        cache.rewind(3)
    assert [slot.get_seq_length() for slot in cache.slots.layers[1:3]] == [WINDOW_MOVED + 1] * 2
    assert not cache.can_rewind(WINDOW_MOVED + 2)
    cache.rewind(WINDOW_MOVED - 1)
    assert cache.length == WINDOW_MOVED - 1
    assert [slot.get_seq_length() for slot in cache.slots.layers[1:3]] == [WINDOW_MOVED - 1] * 2


def test_positions_kept_for_all_indexers_go_back_too() -> None:
    """A model keeps them in one slot, which may be of another node's layer."""
    cache = StageCache(config("llama"), LayerRange(0, 1))
    cache.slots.layers[3].indexer_position_ids = torch.arange(6).expand(4, 1, 6)
    cache.length = 6
    cache.rewind(4)
    assert cache.slots.layers[3].indexer_position_ids.tolist() == [[[0, 1, 2, 3]]] * 4
