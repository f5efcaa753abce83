"""What one HTTP call was, for its one log line."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""A caller's own request id is kept when it is safe in a header and in a log."""
STATUS_CLIENT_LEFT = 499
"""No response: the caller closed the connection first. Seen in logs only."""


class ClientLeft(Exception):
    """The caller closed the connection, or stopped reading for too long."""

    def __init__(self, how: str = "closed") -> None:
        super().__init__(f"the client has left: {how}")
        self.how = how


@dataclass(slots=True)
class RequestRecord:
    """Filled in along the way; `fields` are the keys of the log line beside those named here.

    Args:
        request_id: Also the value of the ``x-request-id`` header.
        started_s: Monotonic time of arrival.
        status: HTTP status; 0 until a response has begun.
    """

    request_id: str
    started_s: float
    status: int = 0
    fields: dict[str, object] = field(default_factory=dict)


def choose_request_id(headers: Mapping[bytes, bytes]) -> str:
    """The caller's ``x-request-id`` when it is sane, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
