"""Which of a checkpoint's tensors take how many bytes, and in which files they lie. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.models.stored import Weight
from shared.models.tensors import TensorEntry


def range_bytes(weights: Iterable[Weight], item_bytes: int | None = None) -> int:
    """Bytes of the given weights, each float taking `item_bytes` if given, else what it takes in the file."""
    return sum(
        weight.num_elements * item_bytes if item_bytes and weight.is_float else weight.nbytes for weight in weights
    )


def majority_float(weights: Iterable[Weight]) -> str | None:
    """The floating element type that most bytes have, quantized ones aside; None when there is none."""
    by_dtype: dict[str, int] = {}
    for weight in weights:
        if isinstance(weight, TensorEntry) and weight.is_float:
            by_dtype[weight.dtype] = by_dtype.get(weight.dtype, 0) + weight.nbytes
    return max(by_dtype, key=lambda dtype: by_dtype[dtype], default=None)


def group_by_file(names: Iterable[str], files: Mapping[str, str]) -> dict[str, list[str]]:
    """File → the tensors wanted of it."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(files[name], []).append(name)
    return grouped
