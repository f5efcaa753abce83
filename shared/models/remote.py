"""The files of a model that lies elsewhere, as values: where each is, how long, and what its hash must be."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from shared.models.errors import ModelUnavailable
from shared.models.folder import INDEX_FILE, PICKLE_ADVICE, SIDE_FILES, SINGLE_FILE

SIDE_FILE_BYTES_MAX: Final = 256 * 1024 * 1024
"""The largest tokenizer is a tenth of it; a config of more is no config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file.

    Args:
        name: In the model's folder.
        url: Where its bytes can be had.
        size_bytes: How many there are.
        sha256: Of the whole file, where the source tells it.
        git_oid: Git's hash of the whole file, which the hub tells for files that are not large.
    """

    name: str
    url: str
    size_bytes: int
    sha256: str | None = None
    git_oid: str | None = None

    def check(self, content: bytes) -> None:
        """Compare the whole file's content with what was announced.

        Raises:
            ModelUnavailable: `hash_mismatch`, naming the file.
        """
        found = expected = ""
        if self.sha256 is not None:
            found, expected = hashlib.sha256(content).hexdigest(), self.sha256
        elif self.git_oid is not None:
            blob = b"blob %d\0" % len(content) + content
            found, expected = hashlib.sha1(blob, usedforsecurity=False).hexdigest(), self.git_oid
        if found != expected:
            raise hash_mismatch(self.url, found, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """All files of one model at one revision.

    Args:
        label: What people call it, with its revision.
        reference: Names it exactly, for any machine; empty where only its URLs do.
        files: By name.
        headers: Sent with each request; secret.
        tls: Of its ``https://`` addresses; None trusts what the system trusts.
    """

    label: str
    reference: str
    files: Mapping[str, RemoteFile]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None

    @property
    def side_files(self) -> list[RemoteFile]:
        """Config, tokenizer and the like.

        Raises:
            ModelUnavailable: `not_a_model`, if one is far too large to be that.
        """
        files = [self.files[name] for name in SIDE_FILES if name in self.files]
        for file in files:
            if file.size_bytes > SIDE_FILE_BYTES_MAX:
                message = f"{file.url} has {file.size_bytes:,} bytes, at most {SIDE_FILE_BYTES_MAX:,} are taken"
                raise ModelUnavailable("not_a_model", message)
        return files

    def require_weights(self) -> None:
        """Whether there are weights that can be read.

        Raises:
            ModelUnavailable: `not_a_model`, with advice where there is a pickle.
        """
        if INDEX_FILE in self.files or SINGLE_FILE in self.files:
            return
        message = f"{self.label} has no {SINGLE_FILE} and no {INDEX_FILE}"
        has_pickle = any(name.startswith("pytorch_model") for name in self.files)
        raise ModelUnavailable("not_a_model", message + (f"; {PICKLE_ADVICE}" if has_pickle else ""))

    def to_json(self) -> dict[str, Any]:
        """Everything but the headers, as JSON values."""
        files = [asdict(file) for file in self.files.values()]
        return {"label": self.label, "reference": self.reference, "files": files}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], headers: Mapping[str, str]) -> RemoteModel:
        """Read what `to_json` wrote.

        Raises:
            KeyError: A field is absent.
            TypeError: A field is unknown or of another type.
        """
        files = {file["name"]: RemoteFile(**file) for file in value["files"]}
        return cls(label=value["label"], reference=value["reference"], files=files, headers=headers)


def hash_mismatch(url: str, found: str, expected: str) -> ModelUnavailable:
    """The error for bytes that are not those that were announced."""
    message = f"{url} gave bytes with hash {found}, expected {expected}; nothing of them was kept"
    return ModelUnavailable("hash_mismatch", message, found=found, expected=expected)
