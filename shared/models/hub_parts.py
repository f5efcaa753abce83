"""Parts of hub repositories: which commit a name means, remembered so that all later requests are of the same one.

A name is pinned when it is first used: ``<cache>/parts/owner--name@main.json`` has the commit and its files, and a
later start asks nobody. `meshnet pull --refresh` removes the pin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.models.fingerprint import fingerprint
from shared.models.folder import ModelFolder
from shared.models.hub import describe_repository, hub_headers
from shared.models.part_folder import PartFolder
from shared.models.progress import ProgressSink
from shared.models.range_client import never
from shared.models.remote import RemoteModel
from shared.models.store import Store
from shared.replace_file import replace_file

MAIN_REVISION = "main"
KEY_COMMIT_CHARS = 12


def fetch_hub_outline(
    repo: str,
    revision: str | None,
    store: Store,
    progress: ProgressSink,
    *,
    refresh: bool = False,
    cancelled: Callable[[], bool] = never,
) -> ModelFolder:
    """Config, tokenizer and headers of a repository; its weights can be fetched range by range.

    Args:
        repo: ``owner/name``.
        revision: A branch, tag or commit; the main branch unless given.
        store: Where parts are kept.
        progress: Told about bytes.
        refresh: Ask the hub which commit it is now, also if that is known from before.
        cancelled: Asked often; once true, fetching ends with `ModelUnavailable` (`cancelled`).

    Raises:
        ModelUnavailable: With the reason, in a sentence for people.
    """
    if refresh:
        forget_pin(repo, revision, store)
    pin = _pin_path(repo, revision, store)
    model = _read_pin(pin, hub_headers())
    if model is None:
        model = describe_repository(repo, revision)
        _write_pin(pin, model)
    commit = model.reference.rpartition("@")[2]
    path = store.parts / f"{_file_name(repo)}@{commit[:KEY_COMMIT_CHARS]}"
    absent = PartFolder(path, model, store, cancelled)
    absent.fetch_outline(progress)
    return ModelFolder(path, repo, fingerprint(path), absent)


def forget_pin(repo: str, revision: str | None, store: Store) -> None:
    """Let the next use ask the hub again."""
    _pin_path(repo, revision, store).unlink(missing_ok=True)


def _pin_path(repo: str, revision: str | None, store: Store) -> Path:
    return store.parts / f"{_file_name(repo)}@{_file_name(revision or MAIN_REVISION)}.json"


def _file_name(text: str) -> str:
    return text.replace("/", "--")


def _read_pin(path: Path, headers: Mapping[str, str]) -> RemoteModel | None:
    """The pinned model; None if there is no pin, or none that this version can read."""
    try:
        return RemoteModel.from_json(json.loads(path.read_text(encoding="utf-8")), headers)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _write_pin(path: Path, model: RemoteModel) -> None:
    replace_file(path, json.dumps(model.to_json()).encode())
