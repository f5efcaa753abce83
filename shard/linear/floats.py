"""Packed linear layers that keep all of a bfloat16 or float16 weight's digits.

torch multiplies one row by a plain bfloat16 matrix at half the memory's speed or less: oneDNN brings the matrix into
its blocked layout each time, and a CPU without bfloat16 instructions is left to a generic loop. Packed once, at load:

=============  =========================  ==================================================================
`OneDnn`       bfloat16, AVX-512 or AMX   oneDNN's own layout
`HalfFbgemm`   any type of 16 bits, AVX2  FBGEMM's float16 matrix, multiplied in float32: slower per weight than
                                          oneDNN's where that exists, twice plain `linear` elsewhere
=============  =========================  ==================================================================
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from shard.linear.packed import PackedLinear

ROWS_HINT = 1
"""How many rows oneDNN should expect: decode steps bring one, and the layout it picks then serves prefill as well."""


class OneDnn(PackedLinear):
    """bfloat16 in oneDNN's layout. Only the order of summation differs from plain `linear`."""

    name: ClassVar[str] = "onednn"
    in_blocks: ClassVar[bool] = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)  # noqa: SLF001 - there is no public name
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        self.nbytes = weight.nbytes

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """It takes bfloat16 alone, and a CPU that computes with it."""
        mkldnn: Any = torch.backends.mkldnn
        if dtype is not torch.bfloat16 or not mkldnn.is_available():
            return False
        operators = torch.ops.mkldnn
        names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
        return all(hasattr(operators, name) for name in names) and bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return 2 * out_features * in_features

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, unpacked."""
        return self._packed.to_dense()  # type: ignore[no-any-return]

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        return self._multiply(inputs, self._packed, None, "none", [], "")  # type: ignore[no-any-return]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The kernel takes any leading axes, and the bias."""
        return self._multiply(inputs, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


class HalfFbgemm(PackedLinear):
    """float16 in FBGEMM's layout; products and sums are float32.

    float16 has three digits more than bfloat16 and less range. Weights are small: those below 2^-14 lose digits, never
    more than 2^-25, and matrices with a weight too large for it stay plain.
    """

    name: ClassVar[str] = "fbgemm-half"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._multiply: Any = unchecked(torch.ops.quantized.linear_dynamic_fp16.default)
        self.nbytes = weight.numel() * 2

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """FBGEMM is built for x86 alone."""
        return dtype in (torch.bfloat16, torch.float16) and has_fbgemm("linear_prepack_fp16", "linear_dynamic_fp16")

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return 2 * out_features * in_features

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        """Weights that float16 can hold."""
        return super().takes(weight) and float(weight.abs().max()) <= torch.finfo(torch.float16).max

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        return self._multiply(inputs.float(), self._packed).to(self._dtype)  # type: ignore[no-any-return]


def has_fbgemm(*operators: str) -> bool:
    """Whether torch has FBGEMM, which needs AVX2, and these of its operators."""
    engines: Any = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and all(hasattr(torch.ops.quantized, name) for name in operators)


def unchecked(operator: Any) -> Any:
    """An operator without torch's search of each call's arguments for those of its compiler: 5 of 40 us."""
    return getattr(operator, "_op", operator)
