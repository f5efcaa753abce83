"""Making floats of weights that are stored quantized, a band of rows at a time: what is read is let go at once.

The arithmetic is that of transformers' own dequantization: in float32, rounded once to the wanted type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from shard.weight_file import TORCH_DTYPES, WeightReader, allocate_tensor
from shared.models.stored import Encoding, QuantizedTensor, Weight
from shared.models.tensors import TensorEntry

BAND_BYTES: Final = 256 * 1024
"""Stored bytes of a band: with its floats it fits a core's own cache."""
FLOATS_4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 values of a 4-bit float (e2m1) stand for."""


def read_weight(reader: WeightReader, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
    """Read one weight, as a float of this type if it is one.

    Args:
        reader: Of the checkpoint.
        weight: What to read.
        dtype: None leaves plain tensors as they are stored, and makes float32 of quantized ones.

    Raises:
        LoadFailed: `weights_corrupt` when a file ends early; also kept as the reader's `failure`.
    """
    if isinstance(weight, TensorEntry):
        return reader.read(weight, dtype)
    return _DECODERS[weight.encoding](reader, weight, dtype or torch.float32)


def _read_scaled(reader: WeightReader, weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(TORCH_DTYPES[weight.codes.dtype]).to(torch.float32)
    return _read_blocks(reader, weight, dtype, numbers)


def _read_int4(reader: WeightReader, weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    return _read_blocks(reader, weight, dtype, _pairs([float(value - 8) for value in range(16)]))


def _read_blocks(
    reader: WeightReader, weight: QuantizedTensor, dtype: torch.dtype, numbers: torch.Tensor
) -> torch.Tensor:
    """What each byte stands for, one number or two, times the scale of its block."""
    rows, columns = weight.shape[-2:]
    block_rows, block_columns = weight.block
    grid = (-1, -(-rows // block_rows), -(-columns // block_columns))
    scales = _read_scales(reader, weight.scales).view(grid)
    tensor = allocate_tensor(weight.shape, dtype)
    stack = tensor.view(-1, rows, columns)
    row_bytes = weight.codes.nbytes // (len(stack) * rows)
    for index, first, codes in _bands(reader, weight.codes, len(stack), rows, row_bytes):
        last = first + len(codes)
        by_row = scales[index, torch.arange(first, last) // block_rows]
        by_element = by_row.repeat_interleave(block_columns, dim=1)[:, :columns]
        stack[index, first:last] = _look_up(numbers, codes).view(last - first, columns).mul_(by_element)
    return tensor


def _read_mxfp4(reader: WeightReader, weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    experts, rows, groups, block_bytes = weight.codes.shape
    scales = _read_scales(reader, weight.scales)
    pairs = _pairs(FLOATS_4)
    tensor = allocate_tensor(weight.shape, dtype)
    for expert, first, codes in _bands(reader, weight.codes, experts, rows, groups * block_bytes):
        last = first + len(codes)
        floats = _look_up(pairs, codes).view(last - first, groups, -1)
        floats *= scales[expert, first:last].unsqueeze(-1)
        tensor[expert, :, first:last] = floats.view(last - first, -1).T
    return tensor


_DECODERS: Final[dict[Encoding, Callable[[WeightReader, QuantizedTensor, torch.dtype], torch.Tensor]]] = {
    "scaled": _read_scaled,
    "int4": _read_int4,
    "mxfp4": _read_mxfp4,
}


def _read_scales(reader: WeightReader, entry: TensorEntry) -> torch.Tensor:
    scales = reader.read(entry, torch.float32)
    if scales.dtype is torch.uint8:  # exponents of two, as the format of the same 8 bits has them
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.to(torch.float32)


def _pairs(values: Sequence[float]) -> torch.Tensor:
    """Both numbers of 4 bits of each byte, the low half first, as what is looked up at once."""
    return torch.tensor([(values[byte & 15], values[byte >> 4]) for byte in range(256)]).view(torch.int64).flatten()


def _look_up(numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The float32 that bytes stand for: several times as fast as indexing, or torch's own conversion of float8."""
    return torch.index_select(numbers, 0, codes.flatten().int()).view(torch.float32)


def _bands(
    reader: WeightReader, entry: TensorEntry, count: int, rows: int, row_bytes: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Index of a matrix, its first row in the band, and the band's rows as bytes."""
    height = max(1, BAND_BYTES // max(1, row_bytes))
    for index in range(count):
        for first in range(0, rows, height):
            last = min(first + height, rows)
            start = (index * rows + first) * row_bytes
            part = reader.read_part(entry, start, (last - first) * row_bytes)
            yield index, first, part.view(last - first, row_bytes)
