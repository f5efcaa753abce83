"""Where a checkpoint's tensors are: safetensors headers and indices, without reading weights. Pure.

A safetensors file is ``[8 bytes: header length N, little-endian][N bytes: JSON][tensor bytes]``. The JSON
maps a name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the end of the
header (https://github.com/huggingface/safetensors#format). A checkpoint of several files has an index
whose `weight_map` says which file holds which tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from shared.models.errors import ModelUnavailable

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000
"""The format's own limit."""

ITEM_BYTES: Final[dict[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes per element of the format's element types."""
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types that may be converted to the one a stage computes in."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes are: `offset` counts from the start of `file`."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """Itself: a weight that is stored quantized is made of several (`shared.models.stored`)."""
        return (self,)

    @property
    def is_float(self) -> bool:
        """Whether it may be converted to what a stage computes in."""
        return self.dtype in FLOATS

    @property
    def end(self) -> int:
        """Offset of the byte after its last."""
        return self.offset + self.nbytes


def parse_index(text: str) -> dict[str, str]:
    """Read an index: tensor name → file name.

    Raises:
        ModelUnavailable: `weights_corrupt` when it is no index, or names a file outside its own folder.
    """
    try:
        files = json.loads(text)["weight_map"]
    except (ValueError, TypeError, KeyError) as error:
        message = "the safetensors index is not a JSON object with a weight_map"
        raise ModelUnavailable("weights_corrupt", message) from error
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelUnavailable("weights_corrupt", "the index's weight_map must map tensor names to file names")
    for file in files.values():
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise ModelUnavailable(
                "weights_corrupt", f"the index names {file!r}, which is no file beside it", file=file
            )
    return files


def header_bytes(prefix: bytes, file: str, file_bytes: int) -> int:
    """The header's length, from the file's first eight bytes.

    Raises:
        ModelUnavailable: `weights_corrupt` when the file cannot hold such a header.
    """
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) < LENGTH_BYTES or not 2 <= length <= min(HEADER_BYTES_MAX, file_bytes - LENGTH_BYTES):
        raise _corrupt(file, f"is {file_bytes} bytes long and announces a header of {length} bytes")
    return length


def parse_header(header: bytes, file: str, file_bytes: int) -> list[TensorEntry]:
    """Read a file's header and check every tensor against the file's length and against the others.

    Raises:
        ModelUnavailable: `weights_corrupt`, naming the file and tensor: malformed, overlapping, or truncated.
    """
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise _corrupt(file, "has a header that is not JSON") from error
    if not isinstance(fields, dict):
        raise _corrupt(file, "has a header that is not a JSON object")
    fields.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(header)
    entries = [_parse_entry(name, value, file, data_start, file_bytes) for name, value in fields.items()]
    _check_apart(entries, file)
    return entries


def _parse_entry(name: str, value: object, file: str, data_start: int, file_bytes: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise _corrupt(file, f"describes tensor {name!r} by something that is not an object")
    dtype, shape, offsets = (
        value.get("dtype"),
        _read_counts(value.get("shape")),
        _read_counts(value.get("data_offsets")),
    )
    if dtype not in ITEM_BYTES:
        raise _corrupt(file, f"holds tensor {name!r} of unknown type {dtype!r}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise _corrupt(file, f"has no valid shape and offsets for tensor {name!r}")
    entry = TensorEntry(name, file, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise _corrupt(file, f"gives tensor {name!r} {offsets[1] - offsets[0]} bytes, its shape takes {entry.nbytes}")
    if entry.end > file_bytes:
        raise _corrupt(file, f"is truncated: tensor {name!r} ends at {entry.end} of {file_bytes} bytes")
    return entry


def _check_apart(entries: Iterable[TensorEntry], file: str) -> None:
    in_order = sorted((entry for entry in entries if entry.nbytes), key=lambda entry: entry.offset)
    for before, after in pairwise(in_order):
        if after.offset < before.end:
            raise _corrupt(file, f"gives tensors {before.name!r} and {after.name!r} the same bytes")


def _read_counts(value: object) -> list[int] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return value
    return None


def _corrupt(file: str, what: str) -> ModelUnavailable:
    return ModelUnavailable("weights_corrupt", f"{file} {what}", file=file)
