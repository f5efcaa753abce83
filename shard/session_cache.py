"""What a stage keeps of one session: transformers' cache object, and the length beside it.

The length stands beside the slots because a stage may hold none that counts positions (only linear
attention, say), and because a step that fails half way leaves slots of different lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from shard.kv_layers import AbsentLayer, GrowingLayer, IndexedLayer, WindowLayer
from shard.transformers_compat import DummyLayer, cacheless_layers
from shared.layers import LayerRange


class RangeCache(DynamicCache):
    """A `DynamicCache` whose slots outside a layer range are absent, addressed by absolute layer index.

    What the model asks before its layers run (how long is the past, how large is the mask) it may ask of a
    slot that is absent; `past_len` answers for those.
    """

    def __init__(self, config: PreTrainedConfig, layers: LayerRange, idle: Collection[int] = ()) -> None:
        super().__init__(config=config)
        self.past_len = 0
        empty = cacheless_layers(config).union(idle)
        self.layers = [_choose_slot(slot, held=i in layers and i not in empty) for i, slot in enumerate(self.layers)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this step, as the slot counts them if it does."""
        slot = self._attention_slot(layer_idx)
        return self.past_len if slot is None else slot.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and first position of the keys that `query_length` new positions will be compared with."""
        slot = self._attention_slot(layer_idx)
        return (self.past_len + query_length, 0) if slot is None else slot.get_mask_sizes(query_length)

    def _attention_slot(self, layer_idx: int) -> Any | None:
        slot = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return slot if isinstance(slot, CacheLayerMixin) else None


class StageCache:
    """One session's keys, values and states on one stage. Opaque to everything but the stage.

    Attributes:
        length: Positions held; a step that fails leaves it as it was.
        damaged: A step failed and a slot could not be put back: the session is lost.

    Args:
        config: The model's.
        layers: The range.
        idle: Layers that never run, and hold nothing.
    """

    def __init__(self, config: PreTrainedConfig, layers: LayerRange, idle: Collection[int] = ()) -> None:
        self.slots = RangeCache(config, layers, idle)
        self.length = 0
        self.damaged = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated, which is more than the positions fill."""
        return sum(_allocated_bytes(slot) for slot in self.slots.layers)

    def bytes_per_position(self) -> int:
        """What one more position takes, once some are held. Slots that do not count positions stay as they are."""
        return sum(_bytes_per_position(slot) for slot in self.slots.layers)

    def opaque_states(self) -> list[torch.Tensor]:
        """What the opaque slots hold, in their order; for comparing caches of the same stage."""
        return [tensor for slot in self.slots.layers if _is_opaque(slot) for tensor in _tensors(slot)]

    def unused_slot(self) -> int | None:
        """Absolute index of a layer of the range that has not put into its slot what it has seen."""
        for i, slot in enumerate(self.slots.layers):
            if isinstance(slot, GrowingLayer | WindowLayer):
                used = slot.get_seq_length() == self.length
            else:
                used = isinstance(slot, DummyLayer) or any(True for _ in _tensors(slot))
            if not used:
                return i
        return None

    def copy(self) -> StageCache:
        """One of its own: whatever kind a slot is, its tensors are copied, and growing one never shows in the other."""
        other = copy.copy(self)
        with torch.inference_mode():
            other.slots = copy.deepcopy(self.slots)
        return other

    @property
    def rewinds(self) -> bool:
        """Whether sessions can go back: every slot holds positions. States have no way back."""
        return all(isinstance(slot, _Rewindable | DummyLayer) for slot in self.slots.layers)

    def can_rewind(self, length: int) -> bool:
        """Whether all slots can go back to their first `length` positions, and continue from there."""
        return length <= self.length and all(_can_truncate(slot, length) for slot in self.slots.layers)

    def rewind(self, length: int) -> None:
        """Go back to the first `length` positions.

        Raises:
            ValueError: Unless `can_rewind`; nothing has changed then.
        """
        if not self.can_rewind(length):
            raise ValueError(f"a cache of {self.length} positions cannot go back to {length}")
        for slot in self.slots.layers:
            _truncate(slot, length)
        self.length = length

    def begin(self) -> RangeCache:
        """The cache to run a step with."""
        self.slots.past_len = self.length
        return self.slots

    def commit(self, new_len: int) -> None:
        """A pass has run through all layers."""
        self.length += new_len

    def abort(self, length: int) -> None:
        """A step has failed somewhere: put the slots back to `length` positions, or be damaged."""
        self.length = length
        for slot in self.slots.layers:
            if _can_truncate(slot, length):
                _truncate(slot, length)
            else:
                self.damaged = True


_Rewindable = GrowingLayer | WindowLayer | IndexedLayer
"""Slots that hold positions, and can forget the last of them."""


def _choose_slot(slot: Any, *, held: bool) -> Any:
    if not held:
        return AbsentLayer(slot)
    if type(slot) is DynamicLayer:
        return GrowingLayer()
    if type(slot) is DynamicSlidingWindowLayer:
        return WindowLayer(slot.sliding_window)
    if type(slot) is DynamicIndexedLayer:
        return IndexedLayer()
    return slot


def _can_truncate(slot: Any, length: int) -> bool:
    """Whether a slot can forget positions; one that counts none can only if it is empty."""
    if isinstance(slot, _Rewindable):
        return slot.can_truncate(length)
    return all(tensor is _shared_positions(slot) for tensor in _tensors(slot))


def _truncate(slot: Any, length: int) -> None:
    if isinstance(slot, _Rewindable):
        slot.truncate(length)
    positions = _shared_positions(slot)
    if positions is not None and length < positions.shape[-1]:
        slot.indexer_position_ids = positions.narrow(-1, 0, length)


def _shared_positions(slot: Any) -> torch.Tensor | None:
    """Position ids ``[..., T]`` that a model keeps for all its indexers in one slot, wherever its layer is."""
    positions: torch.Tensor | None = getattr(slot, "indexer_position_ids", None)
    return positions


def _is_opaque(slot: Any) -> bool:
    return not isinstance(slot, GrowingLayer | WindowLayer | DummyLayer)


def _bytes_per_position(slot: Any) -> int:
    """Attention slots hold positions on the last axis but one, as transformers lays them out."""
    if not isinstance(slot, CacheLayerMixin):
        return 0
    held = [tensor for tensor in (slot.keys, slot.values) if tensor is not None and tensor.numel()]
    return sum(tensor.nbytes // tensor.shape[-2] for tensor in held)


def _allocated_bytes(slot: Any) -> int:
    if isinstance(slot, GrowingLayer | WindowLayer):
        return slot.nbytes
    if isinstance(slot, DummyLayer):
        return 0  # a layer of another node: asked for after every step, so worth its line
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(slot)}
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that an opaque slot holds, also inside its dicts, lists and tuples."""
    for item in vars(value).values() if hasattr(value, "__dict__") else value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            yield from _tensors(item.values())
        elif isinstance(item, list | tuple):
            yield from _tensors(item)
