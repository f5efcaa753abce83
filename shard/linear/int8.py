"""torch's linear layers with int8 weights: one scale per output feature, and the full range of 255 steps.

============  =====================  ================================================
`Int8Fbgemm`  x86 with AVX-512 VNNI  inputs become 8 bits too, each row by its own range
`Int8OneDnn`  x86 with AVX-512 VNNI  the same, by oneDNN's kernel
`Int8Weight`  everywhere             inputs are bfloat16; slow for many rows
============  =====================  ================================================

Kernels of our own are in `shard.linear.rows`.

What torch's `quantize_dynamic` does differently costs 67 % of perplexity on the default model: one scale per matrix,
7 bits of range, and one input scale for all positions, of which the first is often a hundred times as large.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, ClassVar

import torch

from shard.linear.floats import has_fbgemm, unchecked
from shard.linear.packed import PackedLinear
from shared.models.quantized import int8_bytes

LEVELS = 127
PROBE_SIZE = 64
"""Rows and columns of the matrix that FBGEMM is tried with."""
TINY = 1e-12
"""A row of zeros is divided by this."""


class Int8Fbgemm(PackedLinear):
    """A weight in FBGEMM's int8 layout. Its kernel takes one scale for all rows of inputs, so rows share a range."""

    name: ClassVar[str] = "fbgemm-int8"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        scales = row_scales(weight.float(), LEVELS).squeeze(1)
        self._packed = _pack_fbgemm(weight, scales)
        self._multiply: Any = unchecked(torch.ops.quantized.linear_dynamic.default)
        self.nbytes = weight.numel() + scales.nbytes

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return int8_bytes(out_features, in_features)

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """FBGEMM is built for x86 alone, and torch may drop these operators. Only where sums hold 8-bit inputs."""
        named = hasattr(torch, "quantize_per_channel") and has_fbgemm("linear_prepack", "linear_dynamic")
        return dtype.is_floating_point and named and not fbgemm_saturates()

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        inputs_f32 = inputs.float()
        if inputs.numel() == self.in_features:
            return self._multiply(inputs_f32, self._packed).to(self._dtype)  # type: ignore[no-any-return]
        largest = row_scales(inputs_f32, 1)
        outputs: torch.Tensor = self._multiply(inputs_f32 / largest, self._packed)
        return outputs.mul_(largest).to(self._dtype)


class Int8OneDnn(PackedLinear):
    """oneDNN's kernel, on signed inputs."""

    name: ClassVar[str] = "onednn-int8"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        quantized, scales = quantize_rows(weight)
        self._packed = torch.ops.onednn.qlinear_prepack(quantized, None)
        self._scales = scales.squeeze(1)
        self._zeros = torch.zeros(self.out_features, dtype=torch.long)
        self._multiply: Any = torch.ops.onednn.qlinear_pointwise.default
        self.nbytes = weight.numel() + self._scales.nbytes + self._zeros.nbytes

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return int8_bytes(out_features, in_features) + out_features * torch.long.itemsize

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """Only with instructions for 8-bit products (VNNI): without, oneDNN takes a bit from weights and inputs."""
        mkldnn: Any = torch.backends.mkldnn
        names = ("qlinear_prepack", "qlinear_pointwise")
        built = bool(mkldnn.is_available()) and all(hasattr(torch.ops.onednn, name) for name in names)
        return dtype.is_floating_point and built and has_vnni()

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        quantized, scales = quantize_rows(inputs.reshape(-1, self.in_features))
        weight = (self._packed, self._scales, self._zeros)
        outputs = self._multiply(quantized, 1.0, 0, *weight, None, 1.0, 0, torch.float32, "none", [], "")
        return outputs.mul_(scales).to(self._dtype).view(*inputs.shape[:-1], -1)  # type: ignore[no-any-return]


class Int8Weight(PackedLinear):
    """torch's weight-only kernel: part of every build, and slow for many rows."""

    name: ClassVar[str] = "weight-int8"
    in_blocks: ClassVar[bool] = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed, scales = quantize_rows(weight)
        self._scales = scales.squeeze(1).bfloat16()
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return out_features * (in_features + torch.bfloat16.itemsize)

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """It has no public name."""
        return dtype.is_floating_point and hasattr(torch, "_weight_int8pack_mm")

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        rows = inputs.reshape(-1, self.in_features).bfloat16()
        outputs = torch._weight_int8pack_mm(rows, self._packed, self._scales)  # noqa: SLF001
        return outputs.to(self._dtype).view(*inputs.shape[:-1], -1)


def has_vnni() -> bool:
    """Whether the CPU has AVX-512 VNNI: products of 8 bits, added in 32 at once."""
    vnni: Any = getattr(torch.cpu, "_is_vnni_supported", None)
    return vnni is not None and bool(vnni())


@cache
def fbgemm_saturates() -> bool:
    """Whether FBGEMM adds pairs of 8-bit products in 16 bits, which overflow. Found by trying.

    On AVX2, and on AVX-512 without VNNI, it does; which of its kernels it takes is its own choice.
    """
    ones = torch.ones(PROBE_SIZE, PROBE_SIZE)
    packed = _pack_fbgemm(ones, row_scales(ones, LEVELS).squeeze(1))
    outputs = torch.ops.quantized.linear_dynamic(ones, packed)
    return bool((outputs - PROBE_SIZE).abs().max() > 1)


def _pack_fbgemm(weight: torch.Tensor, scales: torch.Tensor) -> Any:
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*are deprecated")  # if they go, `is_available` says so
        quantized = torch.quantize_per_channel(weight.float(), scales.double(), zeros, 0, torch.qint8)
    engines: Any = torch.backends.quantized
    before, engines.engine = engines.engine, "fbgemm"  # it decides whose layout is packed
    try:
        return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        engines.engine = before


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as int8 ``[R, N]``, and the scales ``[R, 1]``, float32, that bring it back."""
    matrix_f32 = matrix.float()
    scales = row_scales(matrix_f32, LEVELS)
    return (matrix_f32 / scales).round_().to(torch.int8), scales


def row_scales(matrix_f32: torch.Tensor, levels: int) -> torch.Tensor:
    """``[R, 1]``: what brings each row to ``-levels … levels``."""
    largest: torch.Tensor = torch.linalg.vector_norm(matrix_f32, torch.inf, -1, keepdim=True)
    return largest.clamp_(min=TINY).div_(levels)
