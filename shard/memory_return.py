"""Giving memory back to the system once a stage is gone, so that what a planner is told is true."""

from __future__ import annotations

import ctypes
import gc
import sys

import structlog

log = structlog.stdlib.get_logger(__name__)


def return_memory() -> None:
    """Collect what refers to itself, and give back what the allocators keep. Takes tenths of a second.

    A stage's modules refer to each other, so they go with a collection only; glibc keeps freed blocks for later, and
    torch keeps CUDA's.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps nothing
        if trim is not None:
            trim(0)
