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
from huggingface_hub import constants, errors, get_token, hf_hub_url, snapshot_download

from shared.models.catalogue import HubFile
from shared.models.download import download
from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ProgressSink
from shared.version import SOFTWARE

CONNECT_TIMEOUT_S: Final = 4.0
"""One attempt to reach the hub; a name that does not resolve or a silent proxy fails sooner or here."""
ANSWER_TIMEOUT_S: Final = 10.0
WANTED_FILES: Final = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Safetensors, tokenizer and config: no pickles, no code, no other frameworks' weights."""
UNWANTED_FILES: Final = ("*/*", "consolidated*", "adapter_*")
"""Folders, a vendor's own copy of the same weights, and adapters."""


def fetch_snapshot(repo: str, progress: ProgressSink, *, refresh: bool = False) -> Path:
    """The folder of a repository in huggingface_hub's cache, fetched if it is not there whole.

    Args:
        repo: ``owner/name``.
        progress: Told about bytes.
        refresh: Ask the hub for a newer revision even if one is there.

    Raises:
        ModelUnavailable: `no_network`, `download_failed`, `unknown_model`.
    """
    wanted: dict[str, Any] = {"allow_patterns": list(WANTED_FILES), "ignore_patterns": list(UNWANTED_FILES)}
    if not refresh:
        with _hub_errors(repo), contextlib.suppress(errors.LocalEntryNotFoundError, OSError):
            folder = Path(snapshot_download(repo, local_files_only=True, **wanted))
            if _holds_weights(folder):
                return folder
    require_hub(f"{repo} is not in the cache, and ")
    with _hub_errors(repo):
        bars = _reporting_bars(f"Downloading {repo}", progress)
        folder = Path(snapshot_download(repo, tqdm_class=bars, **wanted))
    progress(Progress.finished(f"Downloading {repo}"))
    return folder


def fetch_file(source: HubFile, target: Path, size_bytes: int, progress: ProgressSink) -> None:
    """One file of a repository as `target`; what an earlier attempt left there is continued.

    Raises:
        ModelUnavailable: `no_network`, `download_failed`, `unknown_model`.
    """
    require_hub()
    url = hf_hub_url(source.repo, source.file)
    token = get_token()
    headers = {"user-agent": SOFTWARE, **({"authorization": f"Bearer {token}"} if token else {})}
    download(url, target, size_bytes, headers=headers, progress=progress)


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


def _holds_weights(folder: Path) -> bool:
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


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
