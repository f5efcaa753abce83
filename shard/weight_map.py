"""Which of a checkpoint's tensors take how many bytes, and in which files they lie. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.models.tensors import TensorEntry

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types that may be converted to the one a stage computes in."""


def range_bytes(entries: Iterable[TensorEntry], item_bytes: int | None = None) -> int:
    """Bytes of the given tensors, each float taking `item_bytes` if given, else what it takes in the file."""
    return sum(
        entry.num_elements * item_bytes if item_bytes and entry.dtype in FLOATS else entry.nbytes for entry in entries
    )


def majority_float(entries: Iterable[TensorEntry]) -> str | None:
    """The floating element type that most bytes have; None when there is none."""
    by_dtype: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in FLOATS:
            by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.nbytes
    return max(by_dtype, key=lambda dtype: by_dtype[dtype], default=None)


def group_by_file(names: Iterable[str], files: Mapping[str, str]) -> dict[str, list[str]]:
    """File → the tensors wanted of it."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(files[name], []).append(name)
    return grouped
