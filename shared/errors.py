"""Every fault that a peer, a user or a network can cause, as a typed error.

A `MeshError` carries a stable `code` (what a program matches on), a sentence for people, and the
fields that name what was wrong and the limit it broke. Faults of our own code are never
`MeshError`s: those raise `ValueError` or fail an assertion.
"""

from __future__ import annotations

from typing import Literal, get_args

CacheMissReason = Literal[
    "unknown",
    "expired",
    "evicted",
    "past_len_mismatch",
    "not_rewindable",
    "range_mismatch",
    "model_mismatch",
    "disabled",
]
CACHE_MISS_REASONS: tuple[CacheMissReason, ...] = get_args(CacheMissReason)
CALLERS_FAULTS: frozenset[str] = frozenset({"bad_grammar", "no_token_allowed"})
"""Codes of failed steps that say what is wrong with the caller's own request: no other node would serve it either."""


class MeshError(Exception):
    """Base of all faults that come from outside this process.

    Args:
        code: Stable snake_case identifier, for example ``header_too_large``.
        message: One sentence for people; names the field and the limit.
        fields: The values behind the sentence, for logs and for the wire.
    """

    def __init__(self, code: str, message: str, **fields: object) -> None:
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.message = message
        self.fields = fields


class FrameError(MeshError):
    """Bytes that are not a frame: malformed, over a limit, or of an unknown major version."""


class LocalProtocolError(MeshError):
    """Our side tried to send a message that the link's state does not allow."""


class RemoteProtocolError(MeshError):
    """The peer sent a message that the link's state does not allow."""


class HandshakeRefused(MeshError):
    """One side refused the other: `unauthorized`, `version_mismatch`, `model_mismatch` and others."""


class LinkClosed(MeshError):
    """The link is closed, or closed while an answer was awaited."""


class DeadlineExceeded(MeshError):
    """A wait reached its deadline."""


class LoadFailed(MeshError):
    """A model, or the part of it that a node needs, cannot be loaded.

    `model_not_found`, `model_unsupported`, `code_not_trusted`, `code_unavailable`, `weights_missing`,
    `weights_corrupt`, `weights_mismatch`,
    `range_outside_model`, `cut_refused`, `device_unavailable`, `dtype_unsupported`, `too_little_memory` (before
    anything is read), `out_of_memory`; where weights had to be fetched, also the codes of
    `shared.models.errors.ModelUnavailable`.
    """


class CacheMissed(MeshError):
    """A node does not hold exactly the session, position, range and model that a step named.

    `code` is the `CacheMissReason`.
    """

    def __init__(self, reason: CacheMissReason, **fields: object) -> None:
        super().__init__(reason, f"cache miss: {reason}", **fields)
        self.reason: CacheMissReason = reason


class StepFailed(MeshError):
    """A node could not serve a step: `cancelled`, `stale_epoch`, `bad_step`, `out_of_memory` and others."""
