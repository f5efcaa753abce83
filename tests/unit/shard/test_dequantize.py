"""Quantized weights become the floats that they stand for, whatever the band they are read in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shard import dequantize
from shard.dequantize import FLOATS_4, read_weight
from shard.weight_file import WeightReader, read_header
from shared.errors import LoadFailed
from shared.models.compressed_tensors import CompressedTensors
from shared.models.stored import StoredFormat, Weight, join_all
from shared.models.stored_formats import Fp8, Mxfp4

FILE = "model.safetensors"
CODES = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
EXPONENTS = torch.tensor([[[120, 127, 129, 126]] * 3, [[0, 1, 127, 130]] * 3], dtype=torch.uint8)
"""Of blocks of 3 x 3, in the 8 bits of a power of two."""
POWERS = (EXPONENTS.double() - 127).exp2()


def weight_in(folder: Path, tensors: Mapping[str, torch.Tensor], stored: StoredFormat) -> Weight:
    """Write tensors, and find the one weight that they make."""
    save_file(dict(tensors), folder / FILE)
    (weight,) = join_all(stored, read_header(folder, FILE))
    return weight


def read(folder: Path, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
    """The weight as floats."""
    with WeightReader(folder, weight.parts) as reader:
        return read_weight(reader, weight, dtype)


@pytest.mark.parametrize("band_bytes", [1, 25, 1 << 20])
@pytest.mark.parametrize(
    "scales",
    [POWERS.float(), POWERS.bfloat16(), EXPONENTS, EXPONENTS.view(torch.float8_e8m0fnu)],
    ids=["float32", "bfloat16", "bytes", "float8_e8m0"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_each_block_has_its_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scales: torch.Tensor, band_bytes: int, dtype: torch.dtype | None
):
    """Seven rows and ten columns in blocks of three, two matrices in one tensor."""
    monkeypatch.setattr(dequantize, "BAND_BYTES", band_bytes)
    weight = weight_in(tmp_path, {"a": CODES, "a_scale_inv": scales}, Fp8(None, (3, 3)))
    by_element = POWERS.repeat_interleave(3, 1)[:, :7].repeat_interleave(3, 2)[:, :, :10]
    expected = (CODES.double() * by_element).to(dtype or torch.float32)
    assert torch.equal(read(tmp_path, weight, dtype), expected)


@pytest.mark.parametrize("band_bytes", [1, 100, 1 << 20])
def test_every_four_bit_float_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, band_bytes: int):
    """All 256 bytes, the low half first, times the powers of their groups; inputs before outputs."""
    monkeypatch.setattr(dequantize, "BAND_BYTES", band_bytes)
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 4, 2, 16)
    scales = torch.arange(119, 135, dtype=torch.uint8).view(2, 4, 2)
    weight = weight_in(tmp_path, {"a_blocks": blocks, "a_scales": scales}, Mxfp4(None))
    values = read(tmp_path, weight, torch.bfloat16)
    assert values.shape == (2, 64, 4)
    for expert in range(2):
        for out in range(4):
            for position in range(64):
                group, inside = divmod(position, 32)
                byte = int(blocks[expert, out, group, inside // 2])
                code = byte >> 4 if inside % 2 else byte & 15
                expected = FLOATS_4[code] * 2.0 ** (int(scales[expert, out, group]) - 127)
                assert float(values[expert, position, out]) == expected


@pytest.mark.parametrize("band_bytes", [1, 1 << 20])
def test_four_bit_integers_have_the_scale_of_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, band_bytes: int
):
    """Eight to an int32, the first in its lowest bits, 8 more than they are."""
    monkeypatch.setattr(dequantize, "BAND_BYTES", band_bytes)
    numbers = torch.arange(48).view(3, 16) * 5 % 16 - 8
    words = [
        sum((int(numbers[row, 8 * word + i]) + 8) << 4 * i for i in range(8)) for row in range(3) for word in (0, 1)
    ]
    packed = torch.tensor(words).view(3, 2).to(torch.uint32).view(torch.int32)
    scales = torch.rand(3, 4).bfloat16()
    tensors = {"a.weight_packed": packed, "a.weight_scale": scales, "a.weight_shape": torch.tensor([3, 16])}
    weight = weight_in(tmp_path, tensors, CompressedTensors(None))
    expected = numbers.float() * scales.float().repeat_interleave(4, dim=1)
    assert torch.equal(read(tmp_path, weight, torch.float32), expected)


def test_a_file_that_ends_early_is_the_readers_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As with plain tensors: transformers would make another error of it."""
    weight = weight_in(tmp_path, {"a": CODES, "a_scale_inv": POWERS.float()}, Fp8(None, (3, 3)))
    codes_end = weight.parts[0].offset + 20
    with (tmp_path / FILE).open("r+b") as stream:
        stream.truncate(max(codes_end, weight.parts[1].end))
    with WeightReader(tmp_path, weight.parts) as reader, pytest.raises(LoadFailed, match="in the middle of tensor 'a'"):
        read_weight(reader, weight, torch.float32)
    assert reader.failure is not None
