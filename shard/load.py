"""Loading a node's stage; the only module that the rest of a node imports late, because it imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from shard.assignment import Loading
from shard.custom_code import find_code
from shard.device import device_memory
from shard.loader import load_stage
from shard.memory_plan import state_memory
from shard.range_files import fetch_entries
from shard.room import Room
from shard.settings import NodeSettings
from shard.stage_runner import StageRunner
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.models.errors import ModelUnavailable
from shared.models.folder import ModelFolder
from shared.models.progress import Progress
from shared.models.tensors import TensorEntry


def load_runner(
    settings: NodeSettings, folder: ModelFolder, layers: LayerRange, loading: Loading, *, cache_dir: Path | None
) -> StageRunner:
    """Load a range, fetching what the folder lacks. Call it on the thread that will compute.

    Args:
        settings: The node's.
        folder: The model's.
        layers: The range.
        loading: Told bytes done of bytes in all, first of what is fetched, then of what is read.
        cache_dir: Where measurements of this machine are kept; None measures anew.

    Raises:
        LoadFailed: The range cannot be fetched or loaded, or would not fit.
    """
    working_bytes = 0

    def check_memory(device: torch.device, dtype: str, weights_bytes: int) -> None:
        """Of a node that is given ranges, one may have to go first; what it is given fits its machine otherwise."""
        nonlocal working_bytes
        memory = device_memory(device)
        plan = state_memory(folder.path, layers, dtype, memory, settings.kv, weights_bytes=weights_bytes)
        if plan is not None:
            working_bytes = plan.need.working_bytes
        if plan is not None and settings.layers is not None:
            plan.check()

    def show(report: Progress) -> None:
        if report.unit == "bytes" and report.total:
            loading.progress(report.done, report.total)

    def fetch(entries: Iterable[TensorEntry]) -> None:
        try:
            fetch_entries(folder, entries, show)
        except ModelUnavailable as error:
            raise LoadFailed(error.code, error.message, **error.fields) from error

    torch.set_num_threads(settings.threads)  # of this thread's operators
    stage = load_stage(
        folder.path,
        layers,
        device=settings.device,
        dtype=settings.dtype,
        check_memory=check_memory,
        code_dir=find_code(folder) if settings.trust_remote_code else None,
        quantize=settings.quantize,
        cache_dir=cache_dir,
        fetch=fetch,
        progress=loading.progress,
        before_reading=lambda weight_bytes, device: loading.make_room(weight_bytes, lambda: measure_room(device)),
    )
    return StageRunner(stage, tokenizer_json=folder.path / "tokenizer.json", working_bytes=working_bytes)


def measure_room(device: torch.device) -> Room:
    """A device's memory now. Memory that torch keeps for itself counts as free."""
    memory = device_memory(device)
    return Room(memory.free_bytes, memory.used_bytes)
