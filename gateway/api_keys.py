"""API keys: who may call. Compared in constant time, never logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from gateway.openai_errors import ApiError, unauthorized

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/ping"})
"""Probes carry no key and learn nothing but a state."""


class ApiKeys:
    """The configured keys; with none of them, everybody may call.

    Args:
        keys: Secrets that callers present as ``Authorization: Bearer KEY``.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return why the caller is refused, if it is."""
        if not self._digests or path in OPEN_PATHS:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            return unauthorized(given=False)
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return None if any(matches) else unauthorized(given=True)


def _digest(key: bytes) -> bytes:
    """Equal lengths, so that not even a key's length shows in the time that a comparison takes."""
    return hashlib.sha256(key).digest()
