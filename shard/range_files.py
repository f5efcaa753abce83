"""The files of a node's layer range: only the bytes of its own tensors are fetched."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from pathlib import Path

from shard.custom_code import find_code
from shard.loader import plan_range
from shared.layers import LayerRange
from shared.models.folder import ModelFolder
from shared.models.progress import ProgressSink, ignore_progress
from shared.models.range_client import never
from shared.models.range_source import resolve_parts
from shared.models.spans import Span
from shared.models.tensors import TensorEntry


def resolve_range(
    model_name: str,
    layers: LayerRange,
    *,
    fingerprint: str,
    files_url: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    tls: ssl.SSLContext | None = None,
    cache_dir: Path | None = None,
    progress: ProgressSink = ignore_progress,
    cancelled: Callable[[], bool] = never,
) -> ModelFolder:
    """A folder from which `load_stage` can load this range of this model, fetched first if need be.

    Args:
        model_name: What the gateway calls it; need not mean anything on this machine.
        layers: The range.
        fingerprint: Of the model wanted.
        files_url: Where a gateway has its files; None if it has none.
        token: The mesh token, shown to that gateway alone.
        trust_remote_code: The model's own code may be run.
        tls: Of that gateway's address; None trusts what the system trusts.
        cache_dir: Where parts are kept; the platform's cache folder unless given.
        progress: Told about long work.
        cancelled: Asked often; once true, the work ends with `ModelUnavailable` (`cancelled`).

    Raises:
        ModelUnavailable: It cannot be had from anywhere; with what each source said.
        LoadFailed: The model has no such range, or cannot be cut there.
    """

    def complete(folder: ModelFolder) -> None:
        if folder.absent is not None:
            code_dir = find_code(folder) if trust_remote_code else None
            fetch_entries(folder, plan_range(folder.path, layers, code_dir).stored, progress)

    return resolve_parts(
        model_name,
        fingerprint=fingerprint,
        complete=complete,
        files_url=files_url,
        token=token,
        tls=tls,
        cache_dir=cache_dir,
        progress=progress,
        cancelled=cancelled,
    )


def fetch_entries(folder: ModelFolder, entries: Iterable[TensorEntry], progress: ProgressSink) -> None:
    """Make sure that these tensors' bytes are in the folder.

    Raises:
        ModelUnavailable: They cannot be had.
    """
    if folder.absent is None:
        return
    spans: dict[str, list[Span]] = {}
    for entry in entries:
        spans.setdefault(entry.file, []).append(Span(entry.offset, entry.end))
    folder.absent.fetch(spans, progress)
