"""Loading a node's stage; the only module that the rest of a node imports late, because it imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from shard.loader import load_stage
from shard.settings import NodeSettings
from shard.stage_runner import StageRunner


def load_runner(settings: NodeSettings, folder: Path, progress: Callable[[int, int], None]) -> StageRunner:
    """Load the range that the settings name. Call it on the thread that will compute.

    Raises:
        LoadFailed: The range cannot be loaded.
    """
    torch.set_num_threads(settings.threads)  # of this thread's operators
    stage = load_stage(folder, settings.layers, device=settings.device, dtype=settings.dtype, progress=progress)
    return StageRunner(stage, tokenizer_json=folder / "tokenizer.json")
