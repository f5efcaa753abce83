"""Where a range's weights come from: this machine's disk, or wherever the model's name or the gateway leads.

Whatever a name leads to counts only if its fingerprint is the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import structlog

from shard.held_range import Assignment, Loading
from shared.errors import LoadFailed
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import fingerprint
from shared.models.progress import Progress, ProgressSink
from shared.models.source import resolve_model

log = structlog.stdlib.get_logger(__name__)


def local_models(hint: str | None, cache: Path) -> dict[str, Path]:
    """Models on this machine's disk by fingerprint: what `--model` names, if it is a folder, and the cache's.

    Args:
        hint: What `--model` says, if anything.
        cache: The cache folder.
    """
    found: dict[str, Path] = {}
    for folder in _local_folders(hint, cache):
        try:
            found.setdefault(fingerprint(folder), folder)
        except (ModelUnavailable, OSError) as error:
            log.warning("model.unreadable", path=str(folder), reason=str(error))
    return found


def find_weights(assignment: Assignment, loading: Loading, *, hint: str | None, cache: Path) -> Path:
    """The folder with the weights of a range, fetched first if need be. Blocks; call it on the compute thread.

    Raises:
        ModelUnavailable: They cannot be had.
        LoadFailed: `weights_mismatch`: what the name leads to is another model.
        LoadStopped: The range is not wanted any more.
    """
    wanted = assignment.model
    folder = local_models(hint, cache).get(wanted.fingerprint)
    if folder is not None:
        return folder
    return _fetch(assignment, hint, cache, _reporting(loading))


def _fetch(assignment: Assignment, hint: str | None, cache: Path, progress: ProgressSink) -> Path:
    """By the name that the gateway has for the model, or else by this machine's own."""
    wanted = assignment.model
    names = [name for name in dict.fromkeys((wanted.name, hint)) if name]
    reasons = []
    for name in names:
        try:
            model = resolve_model(name, cache_dir=cache, progress=progress)
        except ModelUnavailable as error:
            reasons.append(error.message)
            continue
        if model.fingerprint == wanted.fingerprint:
            return model.path
        reasons.append(f"{name} is model {model.fingerprint} here")
    message = f"model {wanted.fingerprint} cannot be had: {'; '.join(reasons) or 'it has no name'}"
    raise LoadFailed("weights_mismatch", message, model=wanted.fingerprint)


def _reporting(loading: Loading) -> ProgressSink:
    def show(progress: Progress) -> None:
        if progress.unit == "bytes" and progress.total:
            loading.progress(progress.done, progress.total)
        else:
            loading.check()

    return show


def _local_folders(hint: str | None, cache: Path) -> Iterator[Path]:
    if hint is not None and (folder := Path(hint).expanduser()).is_dir():
        yield folder.resolve()
    models = cache / "models"
    if models.is_dir():
        yield from sorted(folder for folder in models.iterdir() if (folder / "config.json").is_file())
