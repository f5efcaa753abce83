"""What a program calls itself in its usage lines: as it was started, through `meshnet` or by itself."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

STARTED_BY_MESHNET: Final = "_MESHNET_FRONT_DOOR"
"""Set by `meshnet` in the environment of the program that it becomes, and by nobody else."""


def program_name(module: str, environ: MutableMapping[str, str]) -> str:
    """``meshnet shard`` or ``python -m shard``. What says so is taken out: it says nothing of our own children."""
    return f"meshnet {module}" if environ.pop(STARTED_BY_MESHNET, None) else f"python -m {module}"
