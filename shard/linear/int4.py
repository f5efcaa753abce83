"""Linear layers with 4-bit weights: groups of 32 inputs, each with a scale and a lowest value in bfloat16.

Four bits hold 16 steps, too few for a whole row: a group takes its own range, at one more bit per weight.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from shard.linear.packed import PackedLinear

GROUP = 32
"""Inputs that share a scale: 32 gives 5 bits per weight, 64 would give 4.5 and twice the loss."""
STEPS = 15
MIDDLE = 8
"""What the kernel subtracts from a weight before it scales it."""
OUT_STEP = 16
"""The kernel lays out so many output features at a time."""
INNER_TILES = 1
"""A parameter of the CUDA kernel's layout; the CPU's ignores it."""
TINY = 1e-8


class Int4Groups(PackedLinear):
    """torch's weight-only kernel. It multiplies in bfloat16, whatever the stage computes in."""

    name: ClassVar[str] = "weight-int4"
    bytes_per_weight: ClassVar[float] = 4 / 8 + 4 / GROUP

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

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        """Whole groups, and whole steps of output features."""
        return super().takes(weight) and not weight.shape[1] % GROUP and not weight.shape[0] % OUT_STEP

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
