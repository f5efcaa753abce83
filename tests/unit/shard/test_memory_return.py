"""Memory that is given back."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from shard.linear import native
from shard.memory_return import page_out

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")


def resident_kib(library: str) -> int:
    """What of a library's file is in this process's memory."""
    total, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_wanted = library in line
        elif is_wanted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_the_compiler_does_not_stay_in_memory_and_can_be_used_again() -> None:
    """Its pages are given back once kernels are compiled; the second time it reads them from its file again."""
    llvm = pytest.importorskip("llvmlite.binding")
    for _ in range(2):
        native._compile(llvm)
        assert resident_kib("libllvmlite") > 20_000
        page_out("libllvmlite")
        assert resident_kib("libllvmlite") < 10_000


def test_a_stage_gives_the_compiler_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as there are kernels, and only then."""
    given_back: list[str] = []
    monkeypatch.setattr(native, "page_out", given_back.append)
    native._compiled.__wrapped__()
    assert given_back == ["libllvmlite"]
