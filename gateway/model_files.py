"""The served model's own files, for nodes that have no copy: which there are, who may read them, how many at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.api_keys import ApiKeys
from gateway.openai_errors import ApiError, retry_after
from shared.mesh_tokens import MeshTokens
from shared.models.folder import INDEX_FILE, SIDE_FILES, ModelFolder, weight_files

MODEL_FILES_PATH: Final = "/mesh/models"
SENDS_AT_ONCE_MAX: Final = 4
"""Answers under way; further ones wait. Enough to fill a link, few enough that chat does not notice."""
WAIT_S_MAX: Final = 15.0
"""How long one waits for its turn; less than a node waits for an answer."""
READER_THREADS: Final = 2
"""Threads that read and hash; the event loop does neither."""


@dataclass(frozen=True, slots=True)
class ServedFile:
    """One file: where it is, its size now, and for small files the hash of its content."""

    path: Path
    size_bytes: int
    sha256: str | None


class ModelFiles:
    """Files of one whole model folder.

    Args:
        folder: The model's.
        tokens: The mesh's, of which callers present one; without any the API keys decide.
    """

    def __init__(self, folder: ModelFolder, tokens: MeshTokens) -> None:
        self.fingerprint = folder.fingerprint
        self.has_token = bool(tokens.accepted())
        self.readers = ThreadPoolExecutor(READER_THREADS, "model-files")
        self._tokens = tokens
        self._files = _list_files(folder.path)
        self._places = asyncio.Semaphore(SENDS_AT_ONCE_MAX)

    @property
    def etag(self) -> str:
        """The same for every file: they are the model's."""
        return f'"{self.fingerprint}"'

    def check_token(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Accept callers who present the mesh token.

        Raises:
            ApiError: 401 for all others.
        """
        if ApiKeys(self._tokens.accepted()).check(path, headers) is not None:
            message = "Nodes present the mesh token: 'Authorization: Bearer TOKEN'."
            raise ApiError(401, message, code="invalid_mesh_token", headers={"www-authenticate": "Bearer"})

    def check_fingerprint(self, fingerprint: str) -> None:
        """Accept the model that is served.

        Raises:
            ApiError: 404 for any other.
        """
        if fingerprint != self.fingerprint:
            message = f"This gateway has the files of the model {self.fingerprint} and of no other."
            raise ApiError(404, message, code="unknown_model")

    def listing(self) -> dict[str, object]:
        """The content of the list of files."""
        files = [
            {"name": name, "size_bytes": file.size_bytes, "sha256": file.sha256} for name, file in self._files.items()
        ]
        return {"model": self.fingerprint, "files": files}

    def find(self, name: str) -> ServedFile:
        """The file of this name.

        Raises:
            ApiError: 404 if it is none of the model's.
        """
        if name not in self._files:
            raise ApiError(404, "The model has no such file.", code="unknown_file")
        return self._files[name]

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a turn, and hold it.

        Raises:
            ApiError: 503 if none came.
        """
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await self._places.acquire()
        except TimeoutError as error:
            message = f"{SENDS_AT_ONCE_MAX} files are being read already."
            raise ApiError(503, message, kind="server_error", code="busy", headers=retry_after(1)) from error
        try:
            yield
        finally:
            self._places.release()


def _list_files(folder: Path) -> dict[str, ServedFile]:
    """By name: nothing else in the folder can be asked for."""
    small = [folder / name for name in (*SIDE_FILES, INDEX_FILE) if (folder / name).is_file()]
    files = {path.name: ServedFile(path, path.stat().st_size, _sha256(path)) for path in small}
    large = {path.name: ServedFile(path, path.stat().st_size, None) for path in weight_files(folder)}
    return files | large


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
