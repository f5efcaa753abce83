"""Packed linear layers on kernels of our own (`shard.linear.native`): weights that lie row by row.

===========  ================================  =====================================================================
`Bf16Rows`   the plain bfloat16 weight itself  inputs and sums float32
`Int8Rows`   a scale for each row              inputs 16 bits, or as many as sums in 32 bits hold; products are exact
`Int4Rows`   scale and lowest value of groups  inputs 16 bits
===========  ================================  =====================================================================

They are for decode steps, which read every weight for a row or a few. For more rows a block of quantized weights at a
time becomes float32, which stays in the caches, and torch multiplies it.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from typing import Any, ClassVar, cast

import torch

from shard.linear.int4 import pack_groups
from shard.linear.int8 import LEVELS, quantize_rows
from shard.linear.native import Multiply, Product, native_absence, native_kernels, scratch_address
from shard.linear.packed import PackedLinear
from shared.models.quantized import fits_int4, int4_bytes, int8_bytes

BLOCK_BYTES = 1 << 20
"""Of weights as float32 at once."""
THREAD_WEIGHTS = 1 << 17
"""A thread for each so many weights: with fewer, threads take longer to begin than to multiply."""
INPUT_LEVELS_MAX = 2**15 - 1
SUM_MAX = 2**31 - 1
KERNEL_TYPES = frozenset((torch.bfloat16, torch.float32))
"""What kernels read and write."""
STEP, STEP_PRODUCTS = 64, 2
"""The int8 kernel adds so many products of each 64 inputs to one sum (`kernels.ll`)."""


class RowKernel(PackedLinear):
    """A weight ``[out_features, in_features]`` in plain rows."""

    in_blocks: ClassVar[bool] = False
    rows_few: ClassVar[int | None] = None
    """Up to so many rows go to the kernel: measured, where the other way becomes faster. None: any number."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._rows, self._scales = self._pack(weight)
        self.nbytes = self._rows.nbytes + (0 if self._scales is None else self._scales.nbytes)
        self._addresses = self._rows.data_ptr(), None if self._scales is None else self._scales.data_ptr()
        self._run = self._kernel()
        self._levels = input_levels(self.in_features)
        self.scratch_floats = self.in_features if self._scales is None else scratch_floats(self.in_features)
        self._threads_max = max(1, weight.numel() // THREAD_WEIGHTS)

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """Where LLVM compiles for the processor."""
        return dtype.is_floating_point and native_absence() is None

    @abstractmethod
    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales as the kernel reads them."""

    @abstractmethod
    def _kernel(self) -> Multiply:
        """Which one."""

    @abstractmethod
    def _write_block(self, first: int, block: torch.Tensor) -> None:
        """Give rows from the first on to ``block``, float32, as far as `_scale_outputs` does not scale them."""

    def _scale_outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, made anew each time."""
        with torch.inference_mode():
            block = torch.empty((self.out_features, self.in_features))
            self._write_block(0, block)
            return self._scale_outputs(block.t()).t().to(self._dtype).contiguous()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.forward`. One row, as decode steps bring it, costs little beside the kernel itself."""
        if not self.takes_row(inputs):
            return super().forward(inputs)
        outputs = torch.empty((*inputs.shape[:-1], self.out_features), dtype=self._dtype)
        self._call(inputs, outputs, 1, scratch_address(self.scratch_floats))
        return outputs if self.bias is None else outputs.add_(self.bias)

    def takes_row(self, inputs: torch.Tensor) -> bool:
        """Whether it is one row as the kernel reads it."""
        is_row = inputs.numel() == self.in_features and inputs.dtype is self._dtype
        return is_row and self._dtype in KERNEL_TYPES and inputs.is_contiguous()

    def product(self) -> Product:
        """What the kernel is called with, for kernels that call it; the layer must outlive it."""
        rows, scales = self._addresses
        return Product(
            multiply=ctypes.cast(cast(Any, self._run), ctypes.c_void_p),
            weight=rows,
            scales=scales,
            bias=None if self.bias is None else self.bias.data_ptr(),
            outs=self.out_features,
            ins=self.in_features,
            threads_max=self._threads_max,
            levels=self._levels,
        )

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        num_rows = inputs.numel() // self.in_features
        is_few = self.rows_few is None or num_rows <= self.rows_few
        outputs = self._multiply_few(inputs, num_rows) if is_few else self._multiply_many(inputs)
        return outputs.to(self._dtype)

    def _multiply_few(self, inputs: torch.Tensor, num_rows: int) -> torch.Tensor:
        held = (inputs if inputs.dtype is torch.bfloat16 else inputs.float()).contiguous()
        outputs = held.new_empty((*inputs.shape[:-1], self.out_features))
        scratch = torch.empty(num_rows * self.scratch_floats)
        self._call(held, outputs, num_rows, scratch.data_ptr())
        return outputs

    def _call(self, inputs: torch.Tensor, outputs: torch.Tensor, num_rows: int, scratch: int) -> None:
        rows, scales = self._addresses
        addresses = (rows, scales, inputs.data_ptr(), scratch, outputs.data_ptr())
        threads, is_bf16 = min(self._threads_max, torch.get_num_threads()), inputs.dtype is torch.bfloat16
        self._run(*addresses, self.out_features, self.in_features, num_rows, threads, is_bf16, self._levels)

    def _multiply_many(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features).float()
        outputs = torch.empty((len(rows), self.out_features))
        step = max(1, BLOCK_BYTES // 4 // self.in_features)
        buffer = torch.empty((min(step, self.out_features), self.in_features))
        for first in range(0, self.out_features, step):
            block = buffer[: self.out_features - first]
            self._write_block(first, block)
            torch.mm(rows, block.t(), out=outputs[:, first : first + len(block)])
        return self._scale_outputs(outputs).view(*inputs.shape[:-1], -1)


class Bf16Rows(RowKernel):
    """The plain weight, neither copied nor changed. Rounded once, to the outputs' bfloat16."""

    name: ClassVar[str] = "rows-bf16"

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """For bfloat16 alone."""
        return dtype is torch.bfloat16 and super().is_available(dtype)

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return 2 * out_features * in_features

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, None]:
        return weight.detach().contiguous(), None

    def _kernel(self) -> Multiply:
        return native_kernels().multiply_bf16

    def _write_block(self, first: int, block: torch.Tensor) -> None:
        block.copy_(self._rows[first : first + len(block)])


class Int8Rows(RowKernel):
    """Inputs become whole numbers too, of so many levels that no sum overflows, whatever the values."""

    name: ClassVar[str] = "rows-int8"
    in_blocks: ClassVar[bool] = True
    rows_few: ClassVar[int | None] = 12

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return int8_bytes(out_features, in_features)

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """As long as inputs keep at least the levels of weights."""
        return super().fits(out_features, in_features) and input_levels(in_features) >= LEVELS

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(weight)

    def _kernel(self) -> Multiply:
        return native_kernels().multiply_int8

    def _write_block(self, first: int, block: torch.Tensor) -> None:
        block.copy_(self._rows[first : first + len(block)])

    def _scale_outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs if self._scales is None else outputs.mul_(self._scales.t())


class Int4Rows(RowKernel):
    """Groups of inputs with 16 steps between a lowest value and a highest."""

    name: ClassVar[str] = "rows-int4"
    in_blocks: ClassVar[bool] = True
    rows_few: ClassVar[int | None] = 8

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return int4_bytes(out_features, in_features)

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """Whole groups."""
        return super().fits(out_features, in_features) and fits_int4(out_features, in_features)

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pack_groups(weight)

    def _kernel(self) -> Multiply:
        self._unpack = native_kernels().unpack_int4
        return native_kernels().multiply_int4

    def _write_block(self, first: int, block: torch.Tensor) -> None:
        if self._scales is not None:
            rows, scales = self._rows[first:].data_ptr(), self._scales[first:].data_ptr()
            self._unpack(rows, scales, block.data_ptr(), len(block), self.in_features)


def input_levels(in_features: int) -> int:
    """Most levels of inputs with which sums of products with int8 weights fit 32 bits, at most those of 16 bits."""
    products = STEP_PRODUCTS * -(-in_features // STEP)
    return min(INPUT_LEVELS_MAX, SUM_MAX // (LEVELS * products))


def scratch_floats(in_features: int) -> int:
    """Room for a row of inputs in the forms that quantizing brings it into (`@run` in `kernels.ll`), and some more."""
    return 2 * in_features + 16
