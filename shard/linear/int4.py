"""Linear layers with 4-bit weights: groups of 64 inputs, each with a scale and a lowest value in bfloat16.

Four bits hold 16 steps, too few for a whole row: a group takes its own range, at half a bit more per weight.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from shard.linear.packed import PackedLinear
from shared.models.quantized import GROUP, fits_int4, int4_bytes

STEPS = 15
BITS = 4
MIDDLE = 8
"""What torch's kernel subtracts from a weight before it scales it."""
INNER_TILES = 1
"""A parameter of the CUDA kernel's layout; the CPU's ignores it."""
WORDS = GROUP // 4
"""Of 16 bits, in a group."""
TINY = 1e-8


class Int4Groups(PackedLinear):
    """torch's weight-only kernel. It multiplies in bfloat16, whatever the stage computes in."""

    name: ClassVar[str] = "weight-int4"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        steps, scales, middles = quantize_groups(weight, MIDDLE)
        quantized = steps.to(torch.int32).view(weight.shape)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(quantized, INNER_TILES)  # noqa: SLF001
        self._scales_and_zeros = torch.stack((scales, middles), dim=-1).transpose(0, 1).contiguous()
        self.nbytes = self._packed.nbytes + self._scales_and_zeros.nbytes

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """It has no public name."""
        names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
        return dtype.is_floating_point and all(hasattr(torch, name) for name in names)

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return int4_bytes(out_features, in_features)

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """Whole groups, and whole steps of output features."""
        return super().fits(out_features, in_features) and fits_int4(out_features, in_features)

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        rows = inputs.reshape(-1, self.in_features).to(torch.bfloat16)
        outputs = torch._weight_int4pack_mm_for_cpu(rows, self._packed, GROUP, self._scales_and_zeros)  # noqa: SLF001
        return outputs.to(self._dtype).view(*inputs.shape[:-1], -1)


def quantize_groups(matrix: torch.Tensor, origin: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps 0 … 15 ``[R, groups, GROUP]``, scales and the values of step ``origin`` ``[R, groups]``, bfloat16."""
    groups = matrix.float().view(matrix.shape[0], -1, GROUP)
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales = (highest - lowest).div_(STEPS).clamp_(min=TINY).bfloat16()
    origins = (lowest + scales.float() * origin).bfloat16()
    # Rounded with the scale and origin that will be used, not those that were wanted.
    steps = ((groups - origins.float()) / scales.float() + origin).round_().clamp_(0, STEPS)
    return steps.to(torch.uint8), scales.squeeze(-1), origins.squeeze(-1)


def pack_groups(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words ``[R, groups, WORDS]`` int16, and ``[R, groups, 2]`` bfloat16: scale and lowest value.

    The lowest four bits of word k are the step of column k of the group, the next four that of `WORDS` + k, and so on.
    """
    steps, scales, lowest = quantize_groups(matrix, 0)
    parts = steps.view(*scales.shape, GROUP // WORDS, WORDS).to(torch.int16)
    words = parts[..., 0, :].clone()
    for index in range(1, GROUP // WORDS):
        words |= parts[..., index, :] << BITS * index
    return words, torch.stack((scales, lowest), dim=-1)


def unpack_groups(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `pack_groups` made, or any rows of it, as float32 ``[…, columns]``."""
    parts = [(words >> BITS * index) & STEPS for index in range(GROUP // WORDS)]
    steps = torch.cat(parts, dim=-1)
    scale, lowest = scales.float().unbind(-1)
    return torch.addcmul(lowest[..., None], steps.float(), scale[..., None]).flatten(-2)
