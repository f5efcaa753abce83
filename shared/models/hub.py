"""Models from the Hugging Face hub, through `huggingface_hub`: its cache, its resuming, its tokens, its mirrors.

What is added: the hub is asked whether it is there before anything else, with one short attempt, so that a
machine without network hears so in seconds; and its errors become one sentence each.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_url, snapshot_download
from huggingface_hub.hf_api import RepoSibling

from shared.models.catalogue import HubFile
from shared.models.download import download
from shared.models.errors import ModelUnavailable
from shared.models.folder import INDEX_FILE, SIDE_FILES, check_folder
from shared.models.progress import Progress, ProgressSink
from shared.models.remote import RemoteFile, RemoteModel
from shared.version import SOFTWARE

CONNECT_TIMEOUT_S: Final = 4.0
"""One attempt to reach the hub; a name that does not resolve or a silent proxy fails sooner or here."""
ANSWER_TIMEOUT_S: Final = 10.0
WANTED_FILES: Final = ("*.safetensors", INDEX_FILE, *SIDE_FILES)
"""Safetensors, tokenizer and config: no pickles, no code, no other frameworks' weights."""
COMMIT_CHARS_SHOWN: Final = 12
UNWANTED_FILES: Final = ("*/*", "consolidated*", "adapter_*")
"""Folders, a vendor's own copy of the same weights, and adapters."""


def find_snapshot(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a repository in huggingface_hub's cache, if it is there whole; the hub is not asked.

    Raises:
        ModelUnavailable: `unknown_model`, for a name that no repository can have.
    """
    with _hub_errors(repo), contextlib.suppress(errors.LocalEntryNotFoundError, OSError):
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, **_wanted()))
        with contextlib.suppress(ModelUnavailable):
            check_folder(folder)
            return folder
    return None


def fetch_snapshot(repo: str, progress: ProgressSink, *, revision: str | None = None, refresh: bool = False) -> Path:
    """The folder of a repository in huggingface_hub's cache, fetched if it is not there whole.

    Args:
        repo: ``owner/name``.
        progress: Told about bytes.
        revision: A branch, tag or commit; the repository's main branch unless given.
        refresh: Ask the hub for a newer revision even if one is there.

    Raises:
        ModelUnavailable: `no_network`, `download_failed`, `unknown_model`.
    """
    folder = None if refresh else find_snapshot(repo, revision)
    if folder is not None:
        return folder
    describe_repository(repo, revision).require_weights()
    with _hub_errors(repo):
        bars = _reporting_bars(f"Downloading {repo}", progress)
        folder = Path(snapshot_download(repo, revision=revision, tqdm_class=bars, **_wanted()))
    progress(Progress.finished(f"Downloading {repo}"))
    return folder


def describe_repository(repo: str, revision: str | None = None) -> RemoteModel:
    """What files a repository has at the commit that a revision names now, with sizes and hashes; one request.

    Raises:
        ModelUnavailable: `no_network`, `download_failed`, `unknown_model`.
    """
    require_hub(f"{repo} is not in the cache, and ")
    with _hub_errors(repo):
        info = HfApi().model_info(
            repo, revision=revision or constants.DEFAULT_REVISION, files_metadata=True, timeout=ANSWER_TIMEOUT_S
        )
    if info.sha is None:
        raise ModelUnavailable("download_failed", f"{constants.ENDPOINT} does not say which commit {repo} is at")
    files = [_remote_file(repo, info.sha, sibling) for sibling in info.siblings or () if "/" not in sibling.rfilename]
    return RemoteModel(
        label=f"{repo}@{info.sha[:COMMIT_CHARS_SHOWN]}",
        reference=f"{repo}@{info.sha}",
        files={file.name: file for file in files},
        headers=hub_headers(),
    )


def _remote_file(repo: str, commit: str, sibling: RepoSibling) -> RemoteFile:
    return RemoteFile(
        name=sibling.rfilename,
        url=hf_hub_url(repo, sibling.rfilename, revision=commit),
        size_bytes=sibling.size or 0,
        sha256=sibling.lfs.sha256 if sibling.lfs else None,
        git_oid=None if sibling.lfs else sibling.blob_id,
    )


def hub_headers() -> dict[str, str]:
    """What each request to the hub carries."""
    token = get_token()
    return {"user-agent": SOFTWARE, **({"authorization": f"Bearer {token}"} if token else {})}


def _wanted() -> dict[str, Any]:
    return {"allow_patterns": list(WANTED_FILES), "ignore_patterns": list(UNWANTED_FILES)}


def fetch_file(source: HubFile, target: Path, size_bytes: int, progress: ProgressSink) -> None:
    """One file of a repository as `target`; what an earlier attempt left there is continued.

    Raises:
        ModelUnavailable: `no_network`, `download_failed`, `unknown_model`.
    """
    require_hub()
    url = hf_hub_url(source.repo, source.file)
    download(url, target, size_bytes, headers=hub_headers(), progress=progress)


def require_hub(before: str = "") -> None:
    """Whether the hub answers at all, whatever it answers.

    Args:
        before: How the error's sentence begins.

    Raises:
        ModelUnavailable: `no_network`.
    """
    if constants.HF_HUB_OFFLINE:
        raise ModelUnavailable("no_network", f"{before}HF_HUB_OFFLINE forbids asking the hub")
    try:
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        httpx.head(constants.ENDPOINT, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelUnavailable(
            "no_network", f"{before}{constants.ENDPOINT} cannot be reached ({error})", endpoint=constants.ENDPOINT
        ) from error


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Say in one sentence what the library says in many.

    Its HTTP client has changed with its major version, so the base of that client's errors is found from the
    library's own.
    """
    http_error: type[Exception] = next(base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelUnavailable(
            "download_failed", f"{repo} asks for an accepted licence: accept it on the hub, then set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _download_failed(repo, error) from error
        raise ModelUnavailable(
            "unknown_model", f"the hub has no {repo}, or it is private and HF_TOKEN does not open it"
        ) from error
    except errors.HFValidationError as error:
        raise ModelUnavailable("unknown_model", f"{repo} is no folder here and no hub repository's name") from error
    except (http_error, OSError) as error:
        raise _download_failed(repo, error) from error


def _download_failed(repo: str, error: Exception) -> ModelUnavailable:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelUnavailable("download_failed", f"downloading {repo} failed: {reason}; a new attempt goes on from here")


def _reporting_bars(task: str, progress: ProgressSink) -> type[Any]:
    """A tqdm class whose byte bars report to `progress`; tqdm documents `display` as the method to replace."""
    tqdm: Any = importlib.import_module("tqdm.auto").tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        """A bar that draws nothing itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B" and self.total:
                progress(Progress(task, int(self.n), int(self.total)))
            return True

        def close(self) -> None:
            self.leave = True
            self.display()
            self.disable = True

    return ReportingBar
