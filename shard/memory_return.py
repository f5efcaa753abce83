"""Giving memory back to the system once a stage is gone, so that what a planner is told is true."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import structlog

MADV_DONTNEED = 4
_MAPPINGS = Path("/proc/self/smaps")

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


def page_out(library: str) -> None:
    """Give back the pages of a shared library that has done its work; a call of it reads them from its file again.

    Args:
        library: What its file's name begins with. Nothing happens on another system than Linux.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in _pages_of_files(library):
        if madvise(begin, end - begin, MADV_DONTNEED) != 0:
            log.warning("memory.not_given_back", library=library, reason=os.strerror(ctypes.get_errno()))


def _pages_of_files(library: str) -> Iterator[tuple[int, int]]:
    """Addresses of what is as in the library's file and stays so: not writable, nor written to as relocations are."""
    begin = end = 0
    for line in _MAPPINGS.read_text(encoding="utf-8").splitlines():
        first, *words = line.split(maxsplit=5)
        if not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
            is_wanted = len(words) == 5 and Path(words[4]).name.startswith(library) and "w" not in words[0]
        elif first == "Anonymous:" and words[0] == "0" and is_wanted:
            yield begin, end
