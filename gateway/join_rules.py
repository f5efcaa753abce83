"""Who may join: how often an address may try, and which of two that present the same id has it. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from gateway.openai_errors import ApiError, retry_after

JOINS_PER_ADDRESS_MAX = 120
"""Attempts from one address in `JOIN_WINDOW_S`: a dozen nodes of one machine that come back with a growing pause."""
JOINS_MAX = 1200
"""Attempts from everywhere in `JOIN_WINDOW_S`."""
JOIN_WINDOW_S = 60.0
UNPROVEN_MAX = 64
"""Connections that have not shown a token yet: each may make us keep `HANDSHAKE_BYTES_MAX` for some seconds."""
QUIET_S = 1.0
"""Two heartbeats without an answer: a link that may be dead, though it is not closed yet."""
REPLACED_EVERY_S = 10.0
"""A live link gives way to one of the same process so often at most: two machines behind one address whose processes
have the same number would otherwise take the id from each other for ever."""


@dataclass(slots=True)
class JoinGate:
    """Counts attempts before anything is known of who makes them."""

    unproven: int = 0
    _attempts: deque[tuple[float, str]] = field(default_factory=deque)
    _by_host: Counter[str] = field(default_factory=Counter)

    def enter(self, host: str, now_s: float) -> ApiError | None:
        """Count one attempt; returns why it is refused. One that is let in calls `leave` in the end."""
        self._forget(now_s)
        if self._by_host[host] >= JOINS_PER_ADDRESS_MAX or len(self._attempts) >= JOINS_MAX:
            return self._too_many_attempts(now_s)
        self._attempts.append((now_s, host))
        self._by_host[host] += 1
        if self.unproven >= UNPROVEN_MAX:
            message = f"This gateway has {UNPROVEN_MAX} connections of nodes that have not said who they are."
            return ApiError(503, message, kind="server_error", code="too_many_joins", headers=retry_after(1))
        self.unproven += 1
        return None

    def leave(self) -> None:
        """An attempt has shown its token, or failed."""
        self.unproven -= 1

    def _forget(self, now_s: float) -> None:
        while self._attempts and now_s - self._attempts[0][0] >= JOIN_WINDOW_S:
            _, host = self._attempts.popleft()
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def _too_many_attempts(self, now_s: float) -> ApiError:
        wait_s = max(1, round(JOIN_WINDOW_S - (now_s - self._attempts[0][0])))
        message = (
            f"Too many attempts to join: at most {JOINS_PER_ADDRESS_MAX} from one address and {JOINS_MAX} in all "
            f"in {JOIN_WINDOW_S:.0f} s."
        )
        return ApiError(429, message, kind="rate_limit_error", code="too_many_joins", headers=retry_after(wait_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has an id now, or wants it.

    Args:
        host: The address it comes from.
        pid: Of its process; 0 where it has not said.
        dialled: The gateway dials it.
        quiet_s: How long nothing has come from it.
        held_s: How long it has had the id.
    """

    host: str
    pid: int = 0
    dialled: bool = False
    quiet_s: float = 0.0
    held_s: float = 0.0


def may_replace(holder: Holder, newcomer: Holder) -> bool:
    """Whether a newcomer takes the id from whoever has it over an open link; else it is refused as a duplicate.

    It does when the holder may be dead, or when it is the same process, which has lost a link that we still take for a
    good one. A node that the gateway dials itself keeps its id: it would dial again at once.
    """
    if holder.dialled:
        return False
    if holder.quiet_s >= QUIET_S:
        return True
    is_same = holder.host == newcomer.host and (holder.pid == newcomer.pid or not (holder.pid and newcomer.pid))
    return is_same and holder.held_s >= REPLACED_EVERY_S
