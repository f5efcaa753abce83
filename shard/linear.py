"""Linear layers on oneDNN's own weight layout, for bfloat16 on the CPU.

torch multiplies one row by a plain bfloat16 matrix at half the memory's speed, because oneDNN has to bring the
matrix into its blocked layout each time. Here that is done once, at load: decoding a token is 1.6 times
faster, prefill no slower. Only the order of summation differs from plain `linear`.

A matrix is read, packed and let go one at a time, the largest first, so that loading never holds the
range twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from shard.model_outline import ModelOutline

ROWS_HINT = 1
"""How many rows oneDNN should expect: decode steps bring one, and the layout it picks then serves prefill as well."""


class PackedLinear(nn.Module):
    """A linear layer whose weight only oneDNN can read.

    Args:
        weight: ``[out_features, in_features]``, bfloat16 on the CPU; not kept.
        bias: ``[out_features]``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)  # noqa: SLF001 - there is no public name
        self._apply_packed: Any = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, unpacked anew each time: for models that look at it beside the forward."""
        return self._packed.to_dense()  # type: ignore[no-any-return]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return self._apply_packed(inputs, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine and torch have the packed kernel for such weights."""
    mkldnn: Any = torch.backends.mkldnn
    if device.type != "cpu" or dtype is not torch.bfloat16 or not mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(operators, name) for name in names) and bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001


def packable_weights(model: nn.Module, outline: ModelOutline) -> frozenset[str]:
    """Names of the weights that only a plain `nn.Linear` uses: not of subclasses, nor a head tied to an embedding.

    Args:
        model: With the range's stand-ins in place.
        outline: How it names its parts.
    """
    tied = {outline.head} if outline.tied and isinstance(_owner(model, outline.embedding), nn.Embedding) else set()
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
    return frozenset(linears - tied)


def pack_linears(model: PreTrainedModel, names: Collection[str], read: Callable[[str], torch.Tensor]) -> None:
    """Replace the linear layers that own the named weights by packed ones, reading each weight as it is needed."""
    for name in sorted(names, key=lambda name: model.get_parameter(name).numel(), reverse=True):
        bias = _owner(model, name).bias
        packed = PackedLinear(read(name), bias.detach() if isinstance(bias, torch.Tensor) else None)
        model.set_submodule(name.removesuffix(".weight"), packed)


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.removesuffix(".weight"))
