"""Parts of the model that a gateway serves, from the gateway's own copy."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx

from shared.models.download import TIMEOUT
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import fingerprint
from shared.models.folder import ModelFolder
from shared.models.part_folder import PartFolder
from shared.models.progress import ProgressSink
from shared.models.range_client import never
from shared.models.remote import RemoteFile, RemoteModel
from shared.models.store import Store
from shared.version import SOFTWARE


def fetch_gateway_outline(
    files_url: str,
    name: str,
    expected: str,
    store: Store,
    progress: ProgressSink,
    *,
    token: str | None,
    tls: ssl.SSLContext | None = None,
    cancelled: Callable[[], bool] = never,
) -> ModelFolder:
    """Config, tokenizer and headers of the model that a gateway serves; weights can be fetched range by range.

    Args:
        files_url: Where the gateway lists the model's files, ``http://host:8000/mesh/models/<fingerprint>``.
        name: What people call the model.
        expected: The fingerprint that what was fetched must have.
        store: Where parts are kept.
        progress: Told about bytes.
        token: The mesh token.
        tls: Of an ``https://`` address; None trusts what the system trusts.
        cancelled: Asked often; once true, fetching ends with `ModelUnavailable` (`cancelled`).

    Raises:
        ModelUnavailable: With the reason, in a sentence for people.
    """
    absent = PartFolder(store.parts / expected, describe_gateway(files_url, token, tls), store, cancelled)
    absent.fetch_outline(progress)
    found = fingerprint(absent.path)
    if found != expected:
        shutil.rmtree(absent.path)
        message = f"{files_url} gave files of the model {found}, not of {expected}; nothing of them was kept"
        raise ModelUnavailable("model_mismatch", message, found=found, expected=expected)
    return ModelFolder(absent.path, name, found, absent)


def describe_gateway(files_url: str, token: str | None, tls: ssl.SSLContext | None = None) -> RemoteModel:
    """What files a gateway has, with sizes and hashes; one request.

    Raises:
        ModelUnavailable: `no_network`, `download_failed`.
    """
    headers = {"user-agent": SOFTWARE, **({"authorization": f"Bearer {token}"} if token else {})}
    try:
        response = httpx.get(files_url, headers=headers, timeout=TIMEOUT, verify=tls or True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ModelUnavailable("no_network", f"{files_url} cannot be reached ({reason})") from error
    if response.status_code != httpx.codes.OK:
        message = f"{files_url} answers {response.status_code}: {_reason(response)}"
        raise ModelUnavailable("download_failed", message)
    try:
        files = [_remote_file(files_url, value) for value in response.json()["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable("download_failed", f"{files_url} gives no list of files") from error
    return RemoteModel(
        label=files_url, reference="", files={file.name: file for file in files}, headers=headers, tls=tls
    )


def _remote_file(files_url: str, value: dict[str, Any]) -> RemoteFile:
    name, sha256 = str(value["name"]), value.get("sha256")
    if "/" in name or name.startswith("."):
        raise ValueError("a file's name must be one in the model's folder")
    return RemoteFile(
        name=name,
        url=f"{files_url}/{quote(name)}",
        size_bytes=int(value["size_bytes"]),
        sha256=None if sha256 is None else str(sha256),
    )


def _reason(response: httpx.Response) -> str:
    """What the gateway says, from its error's JSON."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase
