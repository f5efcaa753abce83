"""Loading a node's stage; the only module that the rest of a node imports late, because it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from shard.loader import load_stage
from shard.range_files import fetch_entries
from shard.settings import NodeSettings
from shard.stage_runner import StageRunner
from shared.errors import LoadFailed
from shared.models.errors import ModelUnavailable
from shared.models.folder import ModelFolder
from shared.models.progress import Progress
from shared.models.tensors import TensorEntry


def load_runner(settings: NodeSettings, folder: ModelFolder, progress: Callable[[int, int], None]) -> StageRunner:
    """Load the range that the settings name, fetching what the folder lacks. Call it on the thread that will compute.

    Args:
        settings: The node's.
        folder: The model's.
        progress: Called with bytes done of bytes in all, first of what is fetched, then of what is read.

    Raises:
        LoadFailed: The range cannot be fetched or loaded.
    """

    def show(report: Progress) -> None:
        if report.unit == "bytes" and report.total:
            progress(report.done, report.total)

    def fetch(entries: Iterable[TensorEntry]) -> None:
        try:
            fetch_entries(folder, entries, show)
        except ModelUnavailable as error:
            raise LoadFailed(error.code, error.message, **error.fields) from error

    torch.set_num_threads(settings.threads)  # of this thread's operators
    stage = load_stage(
        folder.path, settings.layers, device=settings.device, dtype=settings.dtype, fetch=fetch, progress=progress
    )
    return StageRunner(stage, tokenizer_json=folder.path / "tokenizer.json")
