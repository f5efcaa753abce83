"""Where a range's weights come from: this machine's disk, or wherever the model's name or the gateway leads.

Whatever a name leads to counts only if its fingerprint is the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import structlog

from shard.assignment import Assignment, Loading
from shard.settings import NodeSettings
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import fingerprint
from shared.models.folder import ModelFolder
from shared.models.progress import Progress, ProgressSink

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


def find_weights(assignment: Assignment, loading: Loading, *, settings: NodeSettings, cache: Path) -> ModelFolder:
    """The folder with the weights of a range, fetched first if need be. Blocks; call it on the compute thread.

    Raises:
        ModelUnavailable: They cannot be had; with what each place said.
        LoadFailed: The model has no such range.
        LoadStopped: The range is not wanted any more.
    """
    from shard.range_files import resolve_range  # noqa: PLC0415 - torch takes seconds to import

    wanted = assignment.model
    folder = local_models(settings.model, cache).get(wanted.fingerprint)
    if folder is not None:
        return ModelFolder(folder, wanted.name, wanted.fingerprint)
    failures: list[ModelUnavailable] = []
    for name in dict.fromkeys((wanted.name or settings.model or "", settings.model or wanted.name)):
        try:
            return resolve_range(
                name,
                assignment.layers,
                fingerprint=wanted.fingerprint,
                files_url=assignment.files_url,
                token=settings.access.tokens.presented(),
                tls=settings.access.dial_context,
                trust_remote_code=settings.trust_remote_code,
                cache_dir=cache,
                progress=_reporting(loading),
                cancelled=loading.cancelled,
            )
        except ModelUnavailable as error:
            loading.check()  # it may only have been told to stop
            failures.append(error)
    raise failures[0]


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
