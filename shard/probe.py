"""A few tiny passes through a loaded stage: how its layers take positions, and whether they take a cache.

Three positions are run as two and one. That shows what no config says: which axis of a boundary counts positions,
what a position takes in the cache, and whether layers that accept a cache also use it. Where a slot is opaque they are
run again as one and two: some state-space layers of transformers cannot continue from their state by more than one
position, and give something else without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shared.errors import LoadFailed

log = structlog.get_logger(__name__)

LONG_STEP_FIRST, LONG_STEP_LAST = (2, 1), (1, 2)
"""The same positions in different steps: what they give may differ only by rounding."""
POSITIONS = 3
ROUNDING = {torch.float32: 1e-4}
"""Largest relative difference that is rounding, for element types that allow less than `ROUNDING_LOW`."""
ROUNDING_LOW = 0.03


def probe_stage(stage: Stage) -> None:
    """Learn how a stage's layers behave, and set the stage's attributes accordingly.

    A model whose layers reject a cache makes a stateless stage; that is logged here, once.

    Raises:
        LoadFailed: `model_unsupported` when the stage cannot run even without a cache.
    """
    reason = _try_cached(stage)
    if reason is None:
        return
    stage.supports_kv_cache, stage.no_cache_reason, stage.kv_bytes_per_token = False, reason, 0
    error = _try_rehearsal(stage, cached=False)
    if error is not None:
        message = f"{type(stage.config).__name__}: a range of its layers cannot run alone: {_describe(error)}"
        raise LoadFailed("model_unsupported", message, layers=str(stage.layers)) from error
    log.warning("stage.cache_unsupported", layers=str(stage.layers), reason=reason)


def _try_cached(stage: Stage) -> str | None:
    """Why the stage cannot keep a cache; None when it can."""
    if not stage.takes_cache:
        return "the model's forward takes no cache"
    error = _try_rehearsal(stage, cached=True)
    return None if error is None else _describe(error)


def _try_rehearsal(stage: Stage, *, cached: bool) -> Exception | None:
    try:
        _rehearse(stage, cached=cached)
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
        return error
    return None


def _rehearse(stage: Stage, *, cached: bool) -> None:
    long, short = LONG_STEP_FIRST
    if not stage.is_first:
        stage.input_axis = _position_axis(stage.peek(long), stage.peek(short))
    item = _rehearsal_input(stage)
    if not cached:
        long_shape, short_shape = (stage.run(_part(stage, item, 0, new_len, None)).shape for new_len in (long, short))
        _learn_output_axis(stage, long_shape, short_shape)
        return
    cache = stage.new_cache()
    first, last = _run_steps(stage, item, LONG_STEP_FIRST, cache)
    _learn_output_axis(stage, first.shape, last.shape)
    unused = cache.unused_slot()
    if unused is not None:
        raise TypeError(f"layer {unused} accepts a cache and does not use it")
    stage.kv_bytes_per_token = cache.bytes_per_position()
    if cache.opaque_states():
        _learn_chunks(stage, item, last, cache)


def _learn_chunks(stage: Stage, item: StageInput, last: torch.Tensor, cache: StageCache) -> None:
    stage.continues_in_chunks = True
    chunk_cache = stage.new_cache()
    chunk_last = _run_steps(stage, item, LONG_STEP_LAST, chunk_cache)[-1]
    # Outputs alone would not do: what a layer adds drowns in what passes through it.
    pairs = [(_last_position(stage, last), _last_position(stage, chunk_last))]
    pairs += zip(cache.opaque_states(), chunk_cache.opaque_states(), strict=True)
    tolerance = ROUNDING.get(stage.dtype, ROUNDING_LOW)
    stage.continues_in_chunks = all(_are_close(a, b, tolerance) for a, b in pairs)
    if not stage.continues_in_chunks:
        log.info("stage.chunks_unsupported", layers=str(stage.layers))


def _rehearsal_input(stage: Stage) -> StageInput:
    """Three positions that differ from each other, in the form in which the stage receives them."""
    middle = stage.vocab_size // 2  # padding, whose embedding is zero, has a low id or the last
    token_ids = (torch.arange(POSITIONS) + middle).unsqueeze(0) % stage.vocab_size
    if stage.is_first:
        return StageInput(token_ids=token_ids)
    noise = torch.randn(stage.peek(POSITIONS), generator=torch.Generator().manual_seed(0))
    return StageInput(token_ids=token_ids if stage.needs_token_ids else None, hidden_states=noise.to(stage.dtype))


def _run_steps(stage: Stage, item: StageInput, steps: Sequence[int], cache: StageCache) -> list[torch.Tensor]:
    return [stage.run(_part(stage, item, cache.length, new_len, cache)) for new_len in steps]


def _part(stage: Stage, item: StageInput, start: int, new_len: int, cache: StageCache | None) -> StageInput:
    token_ids, hidden_states = item.token_ids, item.hidden_states
    return StageInput(
        token_ids=None if token_ids is None else token_ids[:, start : start + new_len],
        hidden_states=None if hidden_states is None else hidden_states.narrow(stage.input_axis, start, new_len),
        cache=cache,
        past_len=start,
    )


def _learn_output_axis(stage: Stage, long: torch.Size, short: torch.Size) -> None:
    if not stage.is_last:
        stage.output_axis = _position_axis(long, short)


def _last_position(stage: Stage, output: torch.Tensor) -> torch.Tensor:
    return output if stage.is_last else output.select(stage.output_axis, output.shape[stage.output_axis] - 1)


def _are_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    a, b = a.double(), b.double()
    return bool(torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(a))


def _position_axis(long: torch.Size, short: torch.Size) -> int:
    """The axis that counts positions: the one that two passes of different lengths differ in."""
    pairs = enumerate(zip(long, short, strict=True))
    axes = [axis for axis, lengths in pairs if lengths == LONG_STEP_FIRST]
    if len(axes) != 1:
        raise TypeError(f"a boundary has shapes {list(long)} and {list(short)} for {LONG_STEP_FIRST} positions")
    return axes[0]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
