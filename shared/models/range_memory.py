"""What a layer range takes of a machine's memory: one sum, for the planner that places it and the node that holds it.

Pure. All of it follows from `ModelFacts`; the process itself (`RUNTIME_BYTES`) is beside it. What a step works in is
freed when the step ends, so it is counted once, for the largest step there may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shared.layers import LayerRange
from shared.models.facts import ModelFacts, SlotFacts

RUNTIME_BYTES: Final = 400 * 1024 * 1024
"""What a node's process takes besides the sums below: Python, torch, and what their libraries keep. Measured on a
CPU (benchmarks/results/memory.json); on a card its context takes about as much."""
GROWTH: Final = 1.5
"""A slot that grows takes room for half as many positions again (`shard.kv_layers`)."""
CAPACITY_MIN: Final = 256
"""Positions that a slot has room for at first (`shard.kv_layers`)."""
WINDOW_SLACK: Final = 64
"""Positions that a sliding window's slot holds beyond its window (`shard.kv_layers`)."""
CHUNK_TOKENS: Final = 256
"""Positions of a prompt that a hop is given at once (the gateway's `--prefill-chunk-tokens`)."""
CONTEXT_STATED: Final = 32_768
"""Length up to which a node states its working space; each position beyond adds a row of a chunk's mask."""
DRAW_ITEM_BYTES: Final = 32
"""What drawing a token takes of each entry of the vocabulary, beside its logit: four arrays of eight bytes."""
SCORE_LOGITS_BYTES: Final = 2 * 32 * 1024 * 1024
"""Logits of a scored prompt that are held at once (`shard.last_hop`), as the head gives them and in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest steps that a node is to have room for.

    Args:
        chunk_tokens: Positions that enter at once, of one prompt or of a batch of sessions.
        context_len: Positions of the longest session.
    """

    chunk_tokens: int = CHUNK_TOKENS
    context_len: int = CONTEXT_STATED


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeMemory:
    """What a range takes.

    Args:
        weights_bytes: Its layers, the ends it has, and what every range holds.
        kv_bytes_per_token: What one more position of a long session takes: slots that keep every position.
        state_bytes: What a session takes whatever its length: states, and windows once they are full.
        working_bytes: What the largest step takes while it runs.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    working_bytes: int


def range_memory(model: ModelFacts, layers: LayerRange, sizes: StepSizes) -> RangeMemory:
    """What a node with this range takes of its device's memory."""
    slots = [layer.slot for layer in model.layers[layers.start : layers.end]]
    return RangeMemory(
        weights_bytes=weights_bytes(model, layers),
        kv_bytes_per_token=sum(slot.bytes_per_token for slot in slots if slot.tokens_max is None),
        state_bytes=sum(slot.state_bytes + _window_bytes(slot) for slot in slots),
        working_bytes=working_bytes(model, sizes, has_head=layers.end == model.num_layers),
    )


def weights_bytes(model: ModelFacts, layers: LayerRange) -> int:
    """Weights of a range: layers, ends, and what every range holds."""
    own = sum(layer.weight_bytes for layer in model.layers[layers.start : layers.end])
    ends = model.end_bytes(is_first=layers.start == 0, is_last=layers.end == model.num_layers)
    return own + ends + model.shared_bytes


def slot_bytes(slot: SlotFacts, length: int) -> int:
    """The most that one layer allocates for one session of this length."""
    room = max(CAPACITY_MIN, int(length * GROWTH))
    if slot.tokens_max is not None:
        room = min(room, slot.tokens_max + WINDOW_SLACK)
    return slot.state_bytes + slot.bytes_per_token * room


def working_bytes(model: ModelFacts, sizes: StepSizes, *, has_head: bool) -> int:
    """What the largest step takes while it runs, the same for every range but for the head.

    A layer's activations for all new positions; the mask, new positions by all positions; and the largest slot's
    second copy, of keys or of values, while it grows. With the head, the logits of one position and its draw, or of
    the slice of positions that are scored at once.
    """
    new_len, length = sizes.chunk_tokens, sizes.context_len
    layer = new_len * model.step_bytes_per_token + new_len * length * model.mask_bytes_per_pair
    grown = max(_grown_bytes(item.slot, new_len, length) for item in model.layers)
    if not has_head or not model.vocab_size:
        return layer + grown
    drawn = model.vocab_size * (4 + DRAW_ITEM_BYTES)
    scored = min(SCORE_LOGITS_BYTES, 2 * 4 * new_len * model.vocab_size)
    return max(layer + grown, drawn + scored)


def _window_bytes(slot: SlotFacts) -> int:
    return 0 if slot.tokens_max is None else slot.bytes_per_token * (slot.tokens_max + WINDOW_SLACK)


def _grown_bytes(slot: SlotFacts, new_len: int, length: int) -> int:
    """Half of a slot is keys. A window is joined with a chunk beside the slot; others are copied into a larger one."""
    if slot.tokens_max is not None:
        return slot.bytes_per_token * (min(length, slot.tokens_max) + new_len)
    return slot.bytes_per_token * length // 2 + slot.state_bytes
