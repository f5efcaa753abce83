"""Tensors that remember what they were computed from, without values: on the meta device.

Within `Tracing`, whatever torch makes of tensors comes from all the places where they come from. Only origins that
`comes_from` has put there are known; a model's parameters have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

IDS, EMBEDDING = "token_ids", "embedding"

Origin = str | int
"""`IDS`, `EMBEDDING`, or the index of the layer that gave it."""

_ANSWERS: dict[Callable[..., Any], bool] = {
    torch.Tensor.__bool__: True,
    torch.Tensor.item: True,
    torch.Tensor.__contains__: False,
}
"""What a tensor without values says when it is asked for one. Models of transformers ask whether a mask may be left out
and whether positions are those of one sequence (yes), and whether padding is among the token ids (no)."""


class Tracing(TorchFunctionMode):
    """A context within which origins are passed on."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run what was called, and mark what comes of it."""
        if func in _ANSWERS and args[0].is_meta:
            return _ANSWERS[func]
        result = func(*args, **(kwargs or {}))
        origins = origins_of((args, kwargs))
        changed = args[0] if result is None and args else result  # an assignment to a part gives nothing
        for tensor in _tensors(changed) if origins else ():
            comes_from(tensor, *origins, *origins_of(tensor))
        return result


def comes_from(tensor: torch.Tensor, *origins: Origin) -> torch.Tensor:
    """The tensor, whose origins these are from now on."""
    tensor.origins = frozenset(origins)  # type: ignore[attr-defined]
    return tensor


def origins_of(value: Any) -> frozenset[Origin]:
    """Where the tensors in a structure come from."""
    return frozenset().union(*(getattr(tensor, "origins", frozenset()) for tensor in _tensors(value)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
