"""What a node's range will take of its device's memory: said before a weight is read, and refused if it cannot fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from shard.machine import Memory
from shard.settings import KvLimits
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.models.errors import ModelUnavailable
from shared.models.measure import measure_model
from shared.models.range_memory import CAPACITY_MIN, CONTEXT_STATED, RangeMemory, StepSizes, range_memory
from shared.planning.units import size_text

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A range's memory beside what there is.

    Args:
        layers: The range.
        need: What it takes.
        memory: The device's, before loading.
        kv_bytes_max: What sessions may take in all, where that was set.
    """

    layers: LayerRange
    need: RangeMemory
    memory: Memory
    kv_bytes_max: int | None = None

    @property
    def least_bytes(self) -> int:
        """What must be free: weights, the largest step, and sessions: all that they were promised, or one short one."""
        sessions = self.kv_bytes_max
        if sessions is None:
            sessions = self.need.state_bytes + CAPACITY_MIN * self.need.kv_bytes_per_token
        return self.need.weights_bytes + self.need.working_bytes + sessions

    def check(self) -> None:
        """Whether the range can be held and served.

        Raises:
            LoadFailed: `too_little_memory`, with what it takes, what there is, and what would help.
        """
        if self.least_bytes <= self.memory.free_bytes:
            return
        need, left = self.need, self.memory.free_bytes - self.need.weights_bytes - self.need.working_bytes
        advice = "give it fewer --layers, or a smaller --dtype or --quantize"
        if self.kv_bytes_max is not None and left > 0:
            advice = f"lower --kv-max-bytes to at most {left}, or {advice}"
        sessions = f", {size_text(self.kv_bytes_max)} for sessions (--kv-max-bytes)" if self.kv_bytes_max else ""
        raise LoadFailed(
            "too_little_memory",
            f"layers {self.layers} take {size_text(need.weights_bytes)} for weights, "
            f"{size_text(need.working_bytes)} for a step{sessions}, {size_text(self.least_bytes)} in all, "
            f"and {size_text(self.memory.free_bytes)} of {size_text(self.memory.limit_bytes)} are free: {advice}",
            needed_bytes=self.least_bytes,
            free_bytes=self.memory.free_bytes,
        )


def state_memory(
    folder: Path, layers: LayerRange, dtype: str, memory: Memory, kv: KvLimits, *, weights_bytes: int
) -> MemoryPlan | None:
    """Say what a range will take, in the log; `MemoryPlan.check` refuses one that cannot fit.

    Args:
        folder: The model's; only its config and the headers of its weights are read.
        layers: The range.
        dtype: What it will be computed in, a key of `shared.models.measure.ITEM_BYTES`.
        memory: The device's, now.
        kv: What will be kept of sessions.
        weights_bytes: What its weights will take, quantized or not.

    Returns:
        None for a model whose tensors do not say which layer they belong to: that is logged.
    """
    try:
        model = measure_model(folder, dtype)
    except ModelUnavailable as error:
        log.warning("stage.memory_unknown", layers=str(layers), reason=error.message)
        return None
    sizes = StepSizes(context_len=min(model.context_len or CONTEXT_STATED, CONTEXT_STATED))
    need = replace(range_memory(model, layers, sizes), weights_bytes=weights_bytes)
    plan = MemoryPlan(layers, need, memory, kv.bytes_max if kv.enabled else None)
    log.info(
        "stage.memory",
        layers=str(layers),
        weights=plan.need.weights_bytes,
        kv_per_token=plan.need.kv_bytes_per_token,
        state_per_session=plan.need.state_bytes,
        working=plan.need.working_bytes,
        free=memory.free_bytes,
        limit=memory.limit_bytes,
    )
    return plan
