"""What a tensor is on the wire: a name for its element type, a shape, and raw little-endian bytes.

No numpy and no torch here, so the gateway can carry hidden states without either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES: dict[str, int] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
}
"""Bytes per element of each element type that may appear in a frame."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor as a frame carries it.

    Args:
        dtype: A key of `ITEM_BYTES`.
        shape: Sizes, outermost first; an empty tuple is a scalar.
        data: The elements, C-contiguous and little-endian; a view, never a copy of what was received.
            Kept as a flat view of bytes, whatever its own format and shape were.

    Raises:
        ValueError: If the element type is unknown, the bytes do not fill the shape exactly, or are not contiguous.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown element type {self.dtype!r}")
        expected_bytes = tensor_bytes(self.dtype, self.shape)
        if self.data.nbytes != expected_bytes:
            raise ValueError(f"{self.dtype}{list(self.shape)} takes {expected_bytes} bytes, got {self.data.nbytes}")
        if self.data.format != "B" or self.data.ndim != 1 or not self.data.c_contiguous:
            object.__setattr__(self, "data", _flat(self.data))


def _flat(data: memoryview) -> memoryview:
    if not data.c_contiguous:
        raise ValueError("a tensor's bytes must be C-contiguous")
    return data.cast("B") if data.nbytes else memoryview(b"")


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a contiguous tensor."""
    return ITEM_BYTES[dtype] * math.prod(shape)
