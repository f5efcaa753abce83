"""Which of transformers' decoder layers are, by their code, one and the same function.

transformers copies a layer's code from model to model. Where the bytecode of all its parts is that of a model below, a
layer computes what that model's does, whatever it is called; what differs between them is only in their attributes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Reference:
    """A model of transformers: where its code is, what its classes' names begin with, and how it attends."""

    folder: str
    prefix: str
    norms_heads: bool = False

    def find(self, part: str) -> Any:
        """A class or function of its module; None where this transformers has no such thing."""
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}"), part, None)


REFERENCES = (
    Reference("qwen2", "Qwen2"),
    Reference("llama", "Llama"),
    Reference("mistral", "Mistral"),
    Reference("qwen3", "Qwen3", norms_heads=True),
)
"""Norm, attention with rotated halves, norm, and a gated MLP, each added to what went in."""
FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half")
"""What attention calls by name of its module."""


def reference_of(layer: nn.Module) -> Reference | None:
    """The model whose decoder layer has the same code; None where none has, or where a hook may change what it does."""
    children = dict(layer.named_children())
    if set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    if any(_is_changed(module) for module in layer.modules()):
        return None
    return next((reference for reference in REFERENCES if _has_code_of(reference, layer, children)), None)


def _has_code_of(reference: Reference, layer: nn.Module, children: dict[str, nn.Module]) -> bool:
    attention = children["self_attn"]
    pairs = [(layer, "DecoderLayer"), (attention, "Attention"), (children["mlp"], "MLP")]
    norms = [children["input_layernorm"], children["post_attention_layernorm"]]
    if reference.norms_heads:
        norms += [module for name, module in attention.named_children() if name in ("q_norm", "k_norm")]
    pairs += [(norm, "RMSNorm") for norm in norms]
    names = inspect.unwrap(type(attention).forward).__globals__
    return all(
        _same_code(type(module).forward, getattr(reference.find(f"{reference.prefix}{part}"), "forward", None))
        for module, part in pairs
    ) and all(_same_code(names.get(name), reference.find(name)) for name in FUNCTIONS)


def _is_changed(module: nn.Module) -> bool:
    """A forward of its own, or hooks."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001


def _same_code(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    return one is other or (_code(one) is not None and _code(one) == _code(other))


def _code(function: Callable[..., Any]) -> tuple[Any, ...] | None:
    """What it does: its instructions and all that they name, without the docstring and annotations."""
    inner = inspect.unwrap(function)
    code: CodeType | None = getattr(inner, "__code__", None)
    if code is None:
        return None
    constants = code.co_consts[1:] if inner.__doc__ is not None else code.co_consts
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount
