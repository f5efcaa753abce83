"""A first, tiny pass through a loaded stage: what its layers return, and whether they take a cache.

Two positions and then one are run with a cache. That shows what no config says: whether layers return
tuples, which axis of a boundary counts positions, what a position takes in the cache, and whether layers that
accept a cache also use it.
"""

from __future__ import annotations

import structlog
import torch

from shard.stage import Stage
from shared.errors import LoadFailed

log = structlog.get_logger(__name__)

PROBE_LENS = (2, 1)
"""Positions of the two passes: different, so that the axis that counts them shows."""


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
    error = _settle_layer_form(stage, cached=False)
    if error is not None:
        message = f"{type(stage.config).__name__}: a range of its layers cannot run alone: {_describe(error)}"
        raise LoadFailed("model_unsupported", message, layers=str(stage.layers)) from error
    log.warning("stage.cache_unsupported", layers=str(stage.layers), reason=reason)


def _try_cached(stage: Stage) -> str | None:
    """Why the stage cannot keep a cache; None when it can."""
    if not stage.takes_cache:
        return "the model's forward takes no cache"
    error = _settle_layer_form(stage, cached=True)
    return None if error is None else _describe(error)


def _settle_layer_form(stage: Stage, *, cached: bool) -> Exception | None:
    """Find out whether layers return tuples: the stand-ins before the range must return what the model expects."""
    failure: Exception | None = None
    for form in (None, 1):
        stage.layer_form = form
        try:
            _rehearse(stage, cached=cached)
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
            failure = error
            continue
        if stage.is_first or (stage.layer_form is None) == (form is None):
            return None
    return failure or TypeError("layers return neither hidden states nor tuples of them")


def _rehearse(stage: Stage, *, cached: bool) -> None:
    cache = stage.new_cache() if cached else None
    long_input, long_output = stage.rehearse(PROBE_LENS[0], cache)
    allocated = cache.nbytes if cache else 0
    short_input, short_output = stage.rehearse(PROBE_LENS[1], cache)
    stage.input_axis = _position_axis(long_input, short_input)
    stage.output_axis = _position_axis(long_output, short_output)
    if cache is None:
        return
    unused = cache.unused_slot()
    if unused is not None:
        raise TypeError(f"layer {unused} accepts a cache and does not use it")
    # Slots that count positions have room to spare, so what has grown is opaque ones.
    stage.kv_bytes_per_token = cache.position_bytes + (cache.nbytes - allocated) // PROBE_LENS[1]


def _position_axis(long: torch.Size | None, short: torch.Size | None) -> int:
    """The axis that counts positions: the one that two passes of different lengths differ in."""
    if long is None or short is None:
        return 1
    axes = [axis for axis, (a, b) in enumerate(zip(long, short, strict=True)) if (a, b) == PROBE_LENS]
    if len(axes) != 1:
        raise TypeError(f"the layers' boundary has shapes {list(long)} and {list(short)} for {PROBE_LENS} positions")
    return axes[0]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
