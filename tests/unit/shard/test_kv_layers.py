"""The improved slots give what transformers' own give, with fewer copies and no more memory than they say."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from shard.kv_layers import CAPACITY_MIN, REWIND_KEPT, WINDOW_SLACK, GrowingLayer, IndexedLayer, WindowLayer

WINDOW = 8
HEADS, HEAD_DIM = 2, 4
POSITION_BYTES = HEADS * HEAD_DIM * 4
STEPS = [
    (1,) * 200,
    (5, 1, 1, 1, 1, 1, 1),
    (7, 1), (8, 1), (9, 1),
    (300, 1, 1, 70, 2, 65, 64, 63, 1),
    (3, 3, 3, 3, 3, 3),
]  # fmt: skip


def states(new_len: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, recognizable."""
    shape = (1, HEADS, new_len, HEAD_DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def assert_alike(ours: DynamicLayer, theirs: DynamicLayer, steps: tuple[int, ...]) -> None:
    """Same results, lengths and mask sizes at each step."""
    generator = torch.Generator().manual_seed(0)
    for new_len in steps:
        keys, values = states(new_len, generator)
        assert ours.get_mask_sizes(new_len) == theirs.get_mask_sizes(new_len)
        for mine, reference in zip(ours.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(mine, reference)
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_growing_equals_concatenating(steps: tuple[int, ...]) -> None:
    """Full attention sees all positions."""
    assert_alike(GrowingLayer(), DynamicLayer(), steps)


@pytest.mark.parametrize("window", [2, WINDOW, 100])
@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_a_window_equals_transformers_window(window: int, steps: tuple[int, ...]) -> None:
    """Across the edge, by one and by many."""
    assert_alike(WindowLayer(window), DynamicSlidingWindowLayer(window), steps)


def test_growth_is_geometric_and_views_share_memory() -> None:
    """A thousand steps reallocate a handful of times, and a step without growth copies nothing old."""
    layer, generator = GrowingLayer(), torch.Generator()
    allocations = set()
    for _ in range(1000):
        keys, _ = layer.update(*states(1, generator))
        allocations.add(keys.data_ptr())
    assert len(allocations) <= 6
    assert layer.nbytes <= 1.5 * 1000 * 2 * POSITION_BYTES


def test_a_short_session_takes_the_minimum() -> None:
    """Room for a short chat from the start."""
    layer = GrowingLayer()
    assert layer.nbytes == 0
    layer.update(*states(3, torch.Generator()))
    assert layer.nbytes == CAPACITY_MIN * 2 * POSITION_BYTES


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_a_window_never_takes_more_than_it_needs(steps: tuple[int, ...]) -> None:
    """The window and a little slack, however long the session and its chunks."""
    layer, generator = WindowLayer(WINDOW), torch.Generator()
    for new_len in steps:
        layer.update(*states(new_len, generator))
        assert layer.nbytes <= (WINDOW - 1 + WINDOW_SLACK) * 2 * POSITION_BYTES


@pytest.mark.parametrize("layer", [GrowingLayer(), WindowLayer(100)], ids=["growing", "window"])
def test_truncating_forgets_the_last_positions(layer: GrowingLayer | WindowLayer) -> None:
    """What is appended afterwards stands where the forgotten stood."""
    generator = torch.Generator().manual_seed(3)
    kept, dropped, after = (states(new_len, generator) for new_len in (10, 5, 2))
    layer.update(*kept)
    layer.update(*dropped)
    assert layer.can_truncate(10)
    layer.truncate(10)
    assert layer.get_seq_length() == 10
    keys, _ = layer.update(*after)
    assert torch.equal(keys, torch.cat((kept[0], after[0]), dim=-2))


def test_truncating_nothing_is_always_possible() -> None:
    """A slot that the failed step did not reach stays as it is, also an empty one."""
    for layer in (GrowingLayer(), WindowLayer(WINDOW), IndexedLayer()):
        assert layer.can_truncate(0)
        layer.truncate(0)
        assert layer.get_seq_length() == 0
    layer = WindowLayer(WINDOW)
    layer.update(*states(50, torch.Generator()))
    assert layer.can_truncate(50)
    layer.truncate(50)
    assert layer.get_seq_length() == 50


@pytest.mark.parametrize("window", [2, WINDOW, 100])
@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_a_window_goes_back_as_far_as_it_says(window: int, steps: tuple[int, ...]) -> None:
    """From wherever it is: as far as `REWIND_KEPT` always. What follows sees what it would have seen at first."""
    generator = torch.Generator().manual_seed(4)
    everything = [states(new_len, generator) for new_len in steps]
    keys, values = (torch.cat(parts, dim=-2) for parts in zip(*everything, strict=True))
    length = keys.shape[-2]
    after = states(3, generator)
    for back in range(length + 1):
        layer, reference = WindowLayer(window), DynamicSlidingWindowLayer(window)
        for each in everything:
            layer.update(*each)
        kept = length - back
        if not layer.can_truncate(kept):
            assert back > REWIND_KEPT
            break
        layer.truncate(kept)
        reference.update(keys[..., :kept, :], values[..., :kept, :])
        assert layer.get_mask_sizes(3) == reference.get_mask_sizes(3)
        for mine, theirs in zip(layer.update(*after), reference.update(*after), strict=True):
            assert torch.equal(mine, theirs)


def test_a_window_that_has_moved_far_cannot_go_back() -> None:
    """Positions that have left long ago are gone, and it says so."""
    layer, generator = WindowLayer(WINDOW), torch.Generator()
    layer.update(*states(10 * WINDOW, generator))
    assert layer.can_truncate(10 * WINDOW - REWIND_KEPT)
    assert not layer.can_truncate(10 * WINDOW - REWIND_KEPT - 1)
    assert not layer.can_truncate(0)


def test_an_indexer_forgets_with_its_layer() -> None:
    """Keys, values and the indexer's keys: what follows is joined to what is left."""
    generator = torch.Generator().manual_seed(5)
    layer, reference = IndexedLayer(), DynamicIndexedLayer()
    kept, dropped, after = (states(new_len, generator) for new_len in (10, 5, 2))
    kept_index, dropped_index, after_index = (torch.randn((1, n, HEAD_DIM), generator=generator) for n in (10, 5, 2))
    for each, index in ((kept, kept_index), (dropped, dropped_index)):
        layer.update(*each)
        layer.update_indexer(index)
    layer.truncate(10)
    reference.update(*kept)
    reference.update_indexer(kept_index)
    for mine, theirs in zip(layer.update(*after), reference.update(*after), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(layer.update_indexer(after_index), reference.update_indexer(after_index))
