"""Whether a range's weights fit, beside what is held or instead of it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import LoadFailed

SPARE_SHARE = 0.1
"""Of the new weights, what must stay free besides while two ranges are held: sessions go on growing on the old one."""


@dataclass(frozen=True, slots=True)
class Room:
    """A device's memory at one moment.

    Args:
        free_bytes: What could be allocated.
        used_bytes: What this process has there.
    """

    free_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a node may use of its machine.

    Args:
        memory_bytes: All of it: weights, sessions, and what the process takes besides.
        runtime_bytes: What the process takes besides.
    """

    memory_bytes: int
    runtime_bytes: int = 0

    def left_bytes(self, room: Room) -> int:
        """What weights may take now."""
        return max(0, min(room.free_bytes, self.memory_bytes - room.used_bytes))

    def fits_beside(self, weight_bytes: int, room: Room) -> bool:
        """Whether weights fit while what is held stays."""
        return weight_bytes * (1 + SPARE_SHARE) <= self.left_bytes(room)

    def check_alone(self, weight_bytes: int) -> None:
        """Whether weights would fit if nothing else were held.

        Raises:
            LoadFailed: `out_of_memory`, with what there is.
        """
        if not self.session_bytes(weight_bytes):
            raise _too_large(weight_bytes, self.memory_bytes - self.runtime_bytes)

    def check_now(self, weight_bytes: int, room: Room) -> None:
        """Whether weights fit beside all that is held at this moment.

        Raises:
            LoadFailed: `out_of_memory`, with what there is.
        """
        if weight_bytes > self.left_bytes(room):
            raise _too_large(weight_bytes, self.left_bytes(room))

    def session_bytes(self, weight_bytes: int) -> int:
        """What is left for sessions beside these weights."""
        return max(0, self.memory_bytes - self.runtime_bytes - weight_bytes)


def _too_large(weight_bytes: int, left_bytes: int) -> LoadFailed:
    message = f"the range's weights take {weight_bytes} bytes, and this node has {left_bytes} for weights and sessions"
    return LoadFailed("out_of_memory", message, weight_bytes=weight_bytes, left_bytes=left_bytes)
