"""Where a node that was told which model to hold gets its part of it: the first of several places that has it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from shared.models.errors import ModelUnavailable
from shared.models.folder import ModelFolder
from shared.models.gateway_parts import fetch_gateway_outline
from shared.models.hub_parts import fetch_hub_outline
from shared.models.progress import ProgressSink, ignore_progress
from shared.models.range_client import never
from shared.models.source import find_local, parse_hub_id
from shared.models.store import Store, default_cache_dir

_FINAL_CODES: Final = ("cancelled", "disk_full")
"""What another source would not change."""

Source = Callable[[], ModelFolder | None]
"""Gives the model's folder; None where it does not have one of that name."""


def resolve_parts(
    model_name: str,
    *,
    fingerprint: str,
    complete: Callable[[ModelFolder], None],
    files_url: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    cache_dir: Path | None = None,
    progress: ProgressSink = ignore_progress,
    cancelled: Callable[[], bool] = never,
) -> ModelFolder:
    """A folder of exactly this model in which a node's part is there.

    Asked in order: this machine's own whole copy under that name, the hub if the name is a repository's, the gateway.

    Args:
        model_name: What the gateway calls it; need not mean anything on this machine.
        fingerprint: Of the model wanted; whatever has another is passed over.
        complete: Fetches the part that is wanted into a folder that lacks it; may raise `ModelUnavailable`.
        files_url: Where a gateway has its files; None if it has none.
        token: The mesh token, shown to that gateway alone.
        tls: Of that gateway's address; None trusts what the system trusts.
        cache_dir: Where parts are kept; the platform's cache folder unless given.
        progress: Told about long work.
        cancelled: Asked often; once true, the work ends with `ModelUnavailable` (`cancelled`).

    Raises:
        ModelUnavailable: What each source said.
    """
    store = Store(cache_dir or default_cache_dir(os.environ))
    hub_id = parse_hub_id(model_name)

    def from_hub() -> ModelFolder | None:
        if hub_id is None:
            return None
        folder = fetch_hub_outline(*hub_id, store, progress, cancelled=cancelled)
        if folder.fingerprint != fingerprint:  # of a commit that was pinned here long ago?
            folder = fetch_hub_outline(*hub_id, store, progress, refresh=True, cancelled=cancelled)
        return folder

    def from_gateway() -> ModelFolder | None:
        if files_url is None:
            return None
        return fetch_gateway_outline(
            files_url, model_name, fingerprint, store, progress, token=token, tls=tls, cancelled=cancelled
        )

    sources: Mapping[str, Source] = {
        "this machine": lambda: find_local(model_name, store),
        "the hub": from_hub,
        "the gateway": from_gateway,
    }
    return _first(sources, model_name, fingerprint, complete)


def _first(
    sources: Mapping[str, Source], model_name: str, fingerprint: str, complete: Callable[[ModelFolder], None]
) -> ModelFolder:
    """The first source's folder that is of the model wanted and can be completed.

    Raises:
        ModelUnavailable: What each source said.
    """
    failures: list[str] = []
    code = "unknown_model"
    for where, source in sources.items():
        try:
            folder = source()
            if folder is not None and folder.fingerprint == fingerprint:
                complete(folder)
                return folder
        except ModelUnavailable as error:
            if error.code in _FINAL_CODES:
                raise
            failures.append(f"{where}: {error.message}")
            code = error.code
            continue
        if folder is not None:
            failures.append(f"{where}: has the model {folder.fingerprint}")
            code = "model_mismatch"
    reasons = "; ".join(failures) or "there is no copy here, its name is no hub repository's, and no gateway has files"
    message = f"the model {fingerprint} ({model_name or 'without a name'}) cannot be had: {reasons}"
    raise ModelUnavailable(code, message, model=fingerprint)
