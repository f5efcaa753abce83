"""Loading a node's stage; the only module that the rest of a node imports late, because it imports torch."""

from __future__ import annotations

from pathlib import Path

import torch

from shard.held_range import Loading
from shard.loader import load_stage
from shard.machine import free_memory_bytes, resident_bytes
from shard.room import Room
from shard.settings import NodeSettings
from shard.stage_runner import StageRunner
from shared.layers import LayerRange


def load_runner(settings: NodeSettings, folder: Path, layers: LayerRange, loading: Loading) -> StageRunner:
    """Load a range. Call it on the thread that will compute.

    Raises:
        LoadFailed: The range cannot be loaded.
    """
    torch.set_num_threads(settings.threads)  # of this thread's operators
    stage = load_stage(
        folder,
        layers,
        device=settings.device,
        dtype=settings.dtype,
        progress=loading.progress,
        before_reading=lambda weight_bytes, device: loading.make_room(weight_bytes, lambda: measure_room(device)),
    )
    return StageRunner(stage, tokenizer_json=folder / "tokenizer.json")


def measure_room(device: torch.device) -> Room:
    """A device's memory now. Memory that torch keeps for itself counts as free."""
    if device.type == "cuda":
        kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free_bytes = torch.cuda.mem_get_info(device)[0] + kept_bytes
        return Room(free_bytes, torch.cuda.memory_allocated(device))
    return Room(free_memory_bytes(), resident_bytes())
