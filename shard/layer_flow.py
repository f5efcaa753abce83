"""What flows between a model's layers, found by following one pass before any weight is read.

Theory of operation. The model stands on the meta device, where tensors have shapes and no values. Its decoder layers,
input embedding and head are replaced by probes, and one pass is run (`shard.tracing`). What a layer, or the head after
the last one, is given beside the hidden states of the layer before shows what a range needs that does not cross a cut:

==============================================  ===============================================================
a layer is given something of the token ids     every range needs the ids
a layer after the first is given the embedding  every range needs the ids and the real embedding
a layer is given what an earlier one gave       no cut may lie between the two
a layer does not run at all                     no cut right after it: its range would never end
layers run again, or in another order           the model cannot be cut, nor run as a range
==============================================  ===============================================================

What layers hand on through a mapping that all of them write into is not seen here; configs name it, see
`shard.layer_sharing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from shard.call_names import CallNames
from shard.layer_sharing import layers_that_ignore, shared_sources
from shard.model_outline import ModelOutline
from shard.tracing import EMBEDDING, IDS, Origin, Tracing, comes_from, origins_of
from shard.window import PassEnded, StandIn, decoder_layers, unsupported

ROWS, POSITIONS = 2, 7
"""Two rows, so that a model which takes the first item of what it believes to be a tuple changes the shape."""
TUPLE_LENS = (None, 1, 2, 3, 4)
"""What layers of transformers return: hidden states alone, or a tuple of so many items that begins with them."""


@dataclass(frozen=True, slots=True)
class LayerFlow:
    """What a model's layers need of each other and of the model's input.

    Args:
        tuple_len: Items of the tuple that layers return; None when they return hidden states alone.
        needs_token_ids: Layers after the first are given something of the token ids.
        needs_embedding: Layers after the first are given something of the embedding's output.
        positions_from_ids: Positions are counted from the token ids when none are given.
        idle_layers: Layers that do not run when there is nothing but text.
        refused_cuts: Index of the layer before which no cut may lie → why.
    """

    tuple_len: int | None = None
    needs_token_ids: bool = False
    needs_embedding: bool = False
    positions_from_ids: bool = False
    idle_layers: frozenset[int] = frozenset()
    refused_cuts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Visit:
    """One call of a layer, or of the head, whose index is the number of layers."""

    layer: int
    shape: torch.Size
    hidden: frozenset[Origin]
    beside: frozenset[Origin]


def follow_layers(model: PreTrainedModel, outline: ModelOutline) -> LayerFlow:
    """Follow one pass through a model on the meta device, which is as before afterwards.

    Raises:
        LoadFailed: `model_unsupported`, with the reason.
    """
    failure: Exception | None = None
    for tuple_len in TUPLE_LENS:
        try:
            visits = _visit(model, outline, tuple_len)
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
            failure = failure or error
            continue
        if visits and len({visit.shape for visit in visits if visit.layer < outline.num_layers}) == 1:
            return _conclude(model, visits, outline.num_layers, tuple_len)
    why = f"{type(failure).__name__}: {failure}" if failure else "they change the shape of what they pass on"
    raise unsupported(model, f"its layers cannot be followed: {why}")


def _visit(model: PreTrainedModel, outline: ModelOutline, tuple_len: int | None) -> list[Visit]:
    """The calls of layers and head, in order.

    Raises:
        LoadFailed: `model_unsupported`: the pass has ended without the head.
    """
    visits: list[Visit] = []
    ids = comes_from(torch.empty((ROWS, POSITIONS), dtype=torch.long, device="meta"), IDS)
    names = CallNames.of(type(model))
    arguments: dict[str, Any] = {"input_ids": ids} | ({names.use_cache: False} if names.use_cache else {})
    with _probed(model, outline, visits, tuple_len), torch.device("meta"), torch.no_grad(), Tracing():
        try:
            model(**arguments)
        except PassEnded:
            return visits
    raise unsupported(model, "it does not use its output head")


@contextmanager
def _probed(
    model: PreTrainedModel, outline: ModelOutline, visits: list[Visit], tuple_len: int | None
) -> Iterator[None]:
    stack, was_training = decoder_layers(model, outline), model.training
    layers = list(stack)
    ends = {name: model.get_submodule(name) for name in (outline.embedding_module, outline.head_module)}
    for i, layer in enumerate(layers):
        stack[i] = _LayerProbe(layer, i, visits, tuple_len)
    model.set_submodule(outline.embedding_module, _EmbeddingProbe(ends[outline.embedding_module]))
    model.set_submodule(outline.head_module, _HeadProbe(ends[outline.head_module], len(layers), visits))
    model.train(mode=False)
    try:
        yield
    finally:
        model.train(was_training)
        for name, module in ends.items():
            model.set_submodule(name, module)
        for i, layer in enumerate(layers):
            stack[i] = layer


class _LayerProbe(StandIn):
    def __init__(self, original: nn.Module, layer: int, visits: list[Visit], tuple_len: int | None) -> None:
        super().__init__(original)
        self._layer, self._visits, self._tuple_len = layer, visits, tuple_len

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        beside = [args[1:], {name: value for name, value in kwargs.items() if value is not hidden}]
        self._visits.append(Visit(self._layer, hidden.shape, origins_of(hidden), origins_of(beside)))
        output = comes_from(torch.empty_like(hidden), self._layer)
        if self._tuple_len is None:
            return output
        others = (comes_from(torch.empty(1, device="meta"), self._layer) for _ in range(self._tuple_len - 1))
        return (output, *others)


class _EmbeddingProbe(StandIn):
    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self._hidden_size: int = original.weight.shape[-1]  # type: ignore[index,assignment]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return comes_from(torch.empty((*token_ids.shape, self._hidden_size), device="meta"), EMBEDDING)


class _HeadProbe(StandIn):
    def __init__(self, original: nn.Module, num_layers: int, visits: list[Visit]) -> None:
        super().__init__(original)
        self._num_layers, self._visits = num_layers, visits

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        self._visits.append(Visit(self._num_layers, hidden.shape, origins_of(hidden), frozenset()))
        raise PassEnded


def _conclude(model: PreTrainedModel, visits: list[Visit], num_layers: int, tuple_len: int | None) -> LayerFlow:
    order = [visit.layer for visit in visits]
    for before, after in pairwise(order):
        if after <= before:
            raise unsupported(model, f"its layers {after} to {before} run more than once in a pass")
    first, later = visits[0], visits[1:]
    if POSITIONS not in first.shape:
        raise unsupported(model, f"its layers get {list(first.shape)} for {POSITIONS} positions")
    given = frozenset().union(*(visit.hidden | visit.beside for visit in later), first.beside)
    return LayerFlow(
        tuple_len=tuple_len,
        needs_token_ids=bool({IDS, EMBEDDING} & given),
        needs_embedding=EMBEDDING in given,
        positions_from_ids=IDS in first.hidden,
        idle_layers=frozenset(range(num_layers)).difference(order),
        refused_cuts=_refused_cuts(model, visits, num_layers),
    )


def _refused_cuts(model: PreTrainedModel, visits: list[Visit], num_layers: int) -> dict[int, str]:
    """Where a cut would part a layer from what it is given beside the hidden states of the layer before."""
    config = model.config.get_text_config(decoder=True)
    ignoring = layers_that_ignore(config)
    refused = {i + 1: f"layer {i} does not run" for i in range(num_layers) if i not in {v.layer for v in visits}}
    sources = [(consumer, source) for consumer, source in shared_sources(config).items()]
    for before, visit in pairwise(visits):
        beside = frozenset() if visit.layer in ignoring else visit.beside
        given = beside | (visit.hidden - {before.layer})
        sources += [(visit.layer, source) for source in given if isinstance(source, int)]
    for consumer, source in sorted(sources):
        what = f"layer {consumer}" if consumer < num_layers else "the model's end"
        for cut in range(source + 1, min(consumer, num_layers - 1) + 1):
            refused.setdefault(cut, f"{what} uses what layer {source} gave")
    return dict(sorted(refused.items()))
