"""Which range a node is to hold, and what whoever loads it is told and tells."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from shard.room import Room
from shard.runner import Runner
from shard.settings import KvLimits
from shared.layers import LayerRange
from shared.messages import SAMPLING_FIELDS, NodeInfo

Progress = Callable[[int, int], None]
"""Told about bytes done and bytes in all; raises `LoadStopped` when nobody wants the range any more."""


class LoadStopped(Exception):
    """The range that is being loaded is not wanted any more."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is known of the model before its weights are loaded."""

    fingerprint: str
    name: str
    num_layers: int
    context_len: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which range a node is to hold.

    Args:
        model: Of which model.
        layers: Which layers.
        files_url: Where the model's files can be read by byte range; None where nobody offers them.
    """

    model: ServedModel
    layers: LayerRange
    files_url: str | None = None

    def is_same_range(self, other: Assignment) -> bool:
        """Whether both name the same layers of the same model."""
        return (self.model.fingerprint, self.layers) == (other.model.fingerprint, other.layers)


@dataclass(frozen=True, slots=True)
class Loading:
    """What a load reports to while it goes on.

    Args:
        progress: Call it often: it raises `LoadStopped` when the range is not wanted any more.
        cancelled: Whether that is so.
        make_room: Call it with the bytes of the weights and a function that measures the device's memory, before
            weights are read. May wait for the range held before to go; raises `LoadFailed` where there is no room.
    """

    progress: Progress
    cancelled: Callable[[], bool]
    make_room: Callable[[int, Callable[[], Room]], None]

    def check(self) -> None:
        """As `progress`, where there are no bytes to report.

        Raises:
            LoadStopped: The range is not wanted any more.
        """
        if self.cancelled():
            raise LoadStopped("told to stop while loading")


LoadRange = Callable[[Assignment, Loading], Runner]
"""Finds a range's weights and loads them, on the range's compute thread."""


def describe(assignment: Assignment, node_id: str, limits: KvLimits) -> NodeInfo:
    """What is known of a range before it is loaded."""
    model = assignment.model
    return NodeInfo(
        node=node_id,
        pid=os.getpid(),
        model=model.fingerprint,
        model_name=model.name,
        layers=assignment.layers,
        num_layers=model.num_layers,
        token_ids=assignment.layers.end == model.num_layers,
        sampling=SAMPLING_FIELDS,
        kv_cache=limits.enabled,
        kv_ttl_s=limits.ttl_s,
        kv_sessions_max=limits.sessions_max,
        kv_bytes_max=limits.bytes_max or 0,
        context_len=model.context_len,
    )
