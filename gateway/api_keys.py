"""API keys: who may call. Compared in constant time, never logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from gateway.openai_errors import ApiError, unauthorized
from shared.mesh_tokens import MeshTokens

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/ping"})
"""Probes carry no key and learn nothing but a state."""


MESH_PATH = "/mesh"
OPERATED_PATH = "/mesh/nodes/"
"""What is done to nodes: the business of who runs them, so that their token opens it as well as a key."""


class ApiKeys:
    """The configured keys; with none of them, everybody may call.

    Args:
        keys: Secrets that callers present as ``Authorization: Bearer KEY`` or, as Anthropic's clients do, as
            ``x-api-key: KEY``.
        other_secrets: Below this path callers present something else, which is checked there; None for nowhere.
        mesh_tokens: Each opens what lies at `MESH_PATH` as a key does, and closes `OPERATED_PATH` to who has neither.
    """

    def __init__(
        self, keys: Iterable[str], *, other_secrets: str | None = None, mesh_tokens: MeshTokens | None = None
    ) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._elsewhere = None if other_secrets is None else f"{other_secrets}/"
        self._mesh_tokens = mesh_tokens or MeshTokens()

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return why the caller is refused, if it is."""
        is_operated = path.startswith(OPERATED_PATH)
        allowed = self._mesh_digests() if is_operated or path == MESH_PATH else self._digests
        if path in OPEN_PATHS or not (allowed if is_operated else self._digests):
            return None
        if self._elsewhere is not None and path.startswith(self._elsewhere):
            return None
        given = [key for key in _given_keys(headers) if key]
        if not given:
            return unauthorized(given=False)
        accepts = [hmac.compare_digest(_digest(key), digest) for key in given for digest in allowed]
        return None if any(accepts) else unauthorized(given=True)

    def _mesh_digests(self) -> list[bytes]:
        """Keys and the tokens of now: their file may change."""
        return [*self._digests, *(_digest(token.encode()) for token in self._mesh_tokens.accepted())]


def _given_keys(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return (key.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip())


def _digest(key: bytes) -> bytes:
    """Equal lengths, so that not even a key's length shows in the time that a comparison takes."""
    return hashlib.sha256(key).digest()
