"""The mesh's tokens: the first is presented, all are accepted, so that one can take another's place without a pause."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from shared.fields import TEXT_CHARS_MAX
from shared.options import SettingError

SECRETS_FILE_BYTES_MAX: Final = 64 * 1024
"""Hundreds of secrets; a longer file is another file."""
TOKENS_MAX: Final = 64
"""Each is compared with what every peer presents."""

log = structlog.stdlib.get_logger(__name__)


def read_secrets(flag: str, path: Path) -> tuple[str, ...]:
    """The secrets of a file, one a line; empty lines are none.

    Raises:
        SettingError: It cannot be read, or holds none; names the flag and the file, never what is in it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(SECRETS_FILE_BYTES_MAX + 1)
        text = data.decode()
    except OSError as error:
        raise SettingError(flag, f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise SettingError(flag, f"{path} is not UTF-8 text") from None  # the error would quote the file
    if len(data) > SECRETS_FILE_BYTES_MAX:
        raise SettingError(flag, f"{path} is longer than {SECRETS_FILE_BYTES_MAX} bytes")
    secrets = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not secrets:
        raise SettingError(flag, f"{path} holds nothing")
    return secrets


class MeshTokens:
    """Tokens as given, or as a file has them now: it is looked at again whenever somebody presents or checks one.

    Args:
        given: Tokens from flags or a variable; without any, and without a file, the mesh has none and admits all.
        file: Where they are instead, one a line.

    Raises:
        SettingError: Both were given, or one of them cannot be used.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        if given and file is not None:
            raise SettingError("--mesh-token-file", "give either this or --mesh-token, not both")
        self._file = file
        self._seen: tuple[int, ...] = ()
        self._tokens = tuple(dict.fromkeys(given))
        _check("--mesh-token", self._tokens)
        if file is not None:
            self._seen = _signature(file)
            self._tokens = _read_tokens(file)

    def accepted(self) -> tuple[str, ...]:
        """All of them; none when the mesh has no token."""
        if self._file is not None and (signature := _signature(self._file)) != self._seen:
            self._seen = signature
            self._take(self._file)
        return self._tokens

    def presented(self) -> str | None:
        """The one to show to whoever is dialled."""
        return next(iter(self.accepted()), None)

    def _take(self, file: Path) -> None:
        """Read the file again; what cannot be used now changes nothing, for a mesh must not open by a slip."""
        try:
            self._tokens = _read_tokens(file)
        except SettingError as error:
            log.warning("mesh_tokens.kept", reason=error.reason)
        else:
            log.info("mesh_tokens.changed", count=len(self._tokens))


def _read_tokens(file: Path) -> tuple[str, ...]:
    tokens = read_secrets("--mesh-token-file", file)
    _check("--mesh-token-file", tokens)
    return tokens


def _check(flag: str, tokens: Sequence[str]) -> None:
    if len(tokens) > TOKENS_MAX:
        raise SettingError(flag, f"at most {TOKENS_MAX} tokens may be accepted at once, not {len(tokens)}")
    if any(len(token) > TEXT_CHARS_MAX for token in tokens):
        raise SettingError(flag, f"a token has at most {TEXT_CHARS_MAX} characters")


def _signature(file: Path) -> tuple[int, ...]:
    """Changes whenever the file does, also when another takes its place, as mounted secrets do."""
    try:
        status = os.stat(file)  # noqa: PTH116 - follows the link that a mounted secret is
    except OSError:
        return ()
    return (status.st_ino, status.st_mtime_ns, status.st_size)
