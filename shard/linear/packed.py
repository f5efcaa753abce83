"""What every packed linear layer has in common: one weight, in a form that only its own kernel can read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

BLOCK_ELEMENTS = 1 << 23
"""Most weights packed at once: packing makes copies in float32, 32 MB each, and a head may have far more."""
ROW_STEP = 64
"""Blocks have a multiple of so many rows: kernels lay out as many at a time."""


class PackedLinear(nn.Module, ABC):
    """A linear layer whose weight only its kernel can read.

    Args:
        weight: ``[out_features, in_features]`` on the CPU, in the type that the stage computes in; not kept.
        bias: ``[out_features]``.

    Attributes:
        nbytes: What the packed weight takes.
    """

    name: ClassVar[str]
    """How the log and docs/precision.md call the kernel."""
    in_blocks: ClassVar[bool] = True
    """Packing needs a larger copy of the weight for a moment, so large matrices are packed block by block."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._dtype = weight.dtype
        self.nbytes = 0

    @classmethod
    @abstractmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """Whether this machine and torch have the kernel for inputs of such a type."""

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """Whether the kernel can lay out matrices of this shape."""
        return out_features > 0 and in_features > 0

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        """Whether the kernel can hold this matrix; the next one, or a plain layer, does where it cannot."""
        return cls.fits(*weight.shape)

    @staticmethod
    @abstractmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """What a matrix of a shape that fits will take."""

    @abstractmethod
    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]``, at least one row, to ``[..., out_features]`` of the same type, without the bias."""

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, made anew each time: for models that look at it beside the forward."""
        with torch.inference_mode():
            return self.multiply(torch.eye(self.in_features, dtype=self._dtype)).t().contiguous()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        if not inputs.numel():
            return inputs.new_empty((*inputs.shape[:-1], self.out_features))
        outputs = self.multiply(inputs)
        return outputs if self.bias is None else outputs + self.bias


class RowBlocks(nn.Module):
    """A packed linear layer in several blocks of output features, for matrices that are not packed at once."""

    def __init__(self, blocks: list[PackedLinear], bias: torch.Tensor | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.bias = bias
        self.in_features = blocks[0].in_features
        self.out_features = sum(block.out_features for block in blocks)
        self.nbytes = sum(block.nbytes for block in blocks)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, made anew each time."""
        return torch.cat([block.weight for block in self.blocks])  # type: ignore[misc]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        outputs = torch.cat([block(inputs) for block in self.blocks], dim=-1)
        return outputs if self.bias is None else outputs + self.bias


def pack(kernels: Sequence[type[PackedLinear]], weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """A layer on the first of the kernels that takes the weight, else a plain one."""
    for kernel in kernels:
        if kernel.takes(weight):
            if not kernel.in_blocks or weight.numel() <= BLOCK_ELEMENTS:
                return kernel(weight, bias)
            return RowBlocks([kernel(block, None) for block in torch.split(weight, _rows_at_once(weight))], bias)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain


def _rows_at_once(weight: torch.Tensor) -> int:
    return max(1, BLOCK_ELEMENTS // weight.shape[1] // ROW_STEP) * ROW_STEP
