"""Replacing a model's linear layers, and its embedding, by packed ones while the model is loaded.

A matrix is read, packed and let go one at a time, the largest first, so that loading never holds the range twice.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from shard.linear.choice import KERNELS, KernelChoice
from shard.linear.embedding import embedding_bytes, embedding_kind
from shard.linear.packed import pack
from shard.model_outline import ModelOutline
from shared.models.stored import Weight

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Packing:
    """Which parameters are packed, and how.

    Args:
        choice: The kernels of linear layers.
        linears: Names of their weights.
        embedding: Name of the input embedding's weight, where it is quantized.
    """

    choice: KernelChoice
    linears: frozenset[str] = frozenset()
    embedding: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of all parameters that it replaces."""
        return self.linears | ({self.embedding} if self.embedding else frozenset())

    def saves_bytes(self, entries: Mapping[str, Weight], dtype: torch.dtype) -> int:
        """By how many bytes the packed parameters will be smaller than in this type, those made of several aside."""
        packed = {name: entries[name] for name in self.names if name in entries}
        plain_bytes = sum(entry.num_elements for entry in packed.values()) * dtype.itemsize
        return plain_bytes - sum(self._packed_bytes(name, entry.shape, dtype) for name, entry in packed.items())

    def _packed_bytes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if name == self.embedding:
            return embedding_bytes(shape, four_bits=self.four_bits)
        fitting = (kernel.packed_bytes(*shape) for kernel in self.choice.kernels if kernel.fits(*shape))
        return next(fitting, prod(shape) * dtype.itemsize)

    @property
    def four_bits(self) -> bool:
        """Whether weights become int4 where they divide into groups."""
        return any(kernel in KERNELS["int4"] for kernel in self.choice.kernels)


def plan_packing(choice: KernelChoice, linears: frozenset[str], embedding: str | None) -> Packing:
    """What to replace, of what may be."""
    if not choice.kernels:
        return Packing(choice)
    quantizes = any(kernel in KERNELS["int8"] for kernel in choice.kernels)
    return Packing(choice, linears, embedding if quantizes else None)


def packable_weights(model: PreTrainedModel, outline: ModelOutline) -> frozenset[str]:
    """Names of the weights that only a plain `nn.Linear` uses.

    Not of subclasses, nor a head tied to an embedding, nor what the model keeps in float32.

    Args:
        model: With the range's stand-ins in place.
        outline: How it names its parts.
    """
    tied = {outline.head} if outline.tied and isinstance(_owner(model, outline.embedding), nn.Embedding) else set()
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
    kept = kept_in_float32(model)
    return frozenset(name for name in linears - tied if not any(pattern.search(name) for pattern in kept))


def kept_in_float32(model: Any) -> list[re.Pattern[str]]:
    """What finds the names of parameters that a model computes in float32 whatever the rest is in."""
    globs = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}  # noqa: SLF001
    return [re.compile(glob.replace("*", ".*")) for glob in globs]  # as transformers reads them


def packable_embedding(model: nn.Module, outline: ModelOutline) -> str | None:
    """Name of the input embedding's weight, if it is a plain table that nothing else uses."""
    owner = _owner(model, outline.embedding)
    shared = any(outline.embedding in group for group in outline.tied_groups())
    shared = shared and isinstance(_owner(model, outline.head), nn.Linear)
    return outline.embedding if type(owner) is nn.Embedding and owner.max_norm is None and not shared else None


def pack_model(model: PreTrainedModel, packing: Packing, read: Read) -> int:
    """Replace the layers that own the named weights, reading each weight as it is needed.

    Returns:
        By how many bytes the model has become smaller than its plain weights would be.
    """
    saved, trim = 0, _heap_trimmer()
    for name in _largest_first(model, packing.names):
        weight = read(name)
        if name == packing.embedding:
            packed: nn.Module = embedding_kind(tuple(weight.shape), four_bits=packing.four_bits)(weight)
        else:
            bias = _owner(model, name).bias
            packed = pack(packing.choice.kernels, weight, bias.detach() if isinstance(bias, torch.Tensor) else None)
        saved += weight.nbytes - int(getattr(packed, "nbytes", weight.nbytes))
        model.set_submodule(name.removesuffix(".weight"), packed)
        del weight, packed
        trim()
    return saved


def _heap_trimmer() -> Callable[[], object]:
    """What gives free memory back to the system: copies made while packing leave holes between what is kept."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return lambda: None
    return lambda: malloc_trim(0)


def _largest_first(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    return sorted(names, key=lambda name: (-model.get_parameter(name).numel(), name))


def _owner(model: nn.Module, parameter: str) -> Any:
    return model.get_submodule(parameter.removesuffix(".weight"))
