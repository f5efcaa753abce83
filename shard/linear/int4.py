"""Linear layers with 4-bit weights: groups of 32 inputs, each with a scale and a lowest value in bfloat16.

Four bits hold 16 steps, too few for a whole row: a group takes its own range, at one more bit per weight.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from shard.linear.packed import PackedLinear
from shared.models.quantized import GROUP, fits_int4, int4_bytes

STEPS = 15
MIDDLE = 8
"""What the kernel subtracts from a weight before it scales it."""
INNER_TILES = 1
"""A parameter of the CUDA kernel's layout; the CPU's ignores it."""
TINY = 1e-8


class Int4Groups(PackedLinear):
    """torch's weight-only kernel. It multiplies in bfloat16, whatever the stage computes in."""

    name: ClassVar[str] = "weight-int4"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        quantized, scales_and_zeros = quantize_groups(weight)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(quantized, INNER_TILES)  # noqa: SLF001
        self._scales_and_zeros = scales_and_zeros
        self.nbytes = self._packed.nbytes + scales_and_zeros.nbytes

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


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as 0 … 15 ``[O, I]`` int32, and ``[I / GROUP, O, 2]`` bfloat16: scale, and the value of `MIDDLE`."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales = (highest - lowest).div_(STEPS).clamp_(min=TINY).bfloat16()
    middles = (lowest + scales.float() * MIDDLE).bfloat16()
    # Rounded with the scale and middle that will be used, not those that were wanted.
    steps = ((groups - middles.float()) / scales.float() + MIDDLE).round_().clamp_(0, STEPS)
    scales_and_zeros = torch.cat((scales, middles), dim=-1).transpose(0, 1).contiguous()
    return steps.to(torch.int32).view(weight.shape), scales_and_zeros
