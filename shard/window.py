"""The windowed model: a model's own class and forward, with only one range of its decoder layers in place.

Theory of operation. The model is built whole on the meta device, where it takes no memory. Then, for a
range ``[start, end)``:

====================  ========================================================================
layers before         `PassThrough`; the one at ``start - 1`` is an `Injection`, which gives the
                      hidden states received from the hop before, whatever the model made of
                      its embeddings
layers of the range   kept; a hook asks before each whether the step has been cancelled
the last of the range a hook takes its output and ends the pass by raising `PassEnded`, except
                      where final norm and head are to follow
layers after          `PassThrough`, never reached
input embedding       a table of zeros where the range has no use for the real one
output head           absent where the range has no use for it
parts not for text    absent: towers for images, where the model's class has them
====================  ========================================================================

So masks, rotary tables and layer kinds are the model's own, and there is no code for any one model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from shard.model_outline import ModelOutline, common_prefix, find_other_parts
from shared.errors import LoadFailed, StepFailed
from shared.layers import LayerRange


class PassEnded(Exception):
    """Raised through the model's forward once the range's last layer has run."""


class PassState:
    """What the stand-ins and hooks of one windowed model share: the step that is running.

    Attributes:
        injected: Hidden states for the first layer of the range.
        peeking: End the pass at the injection, to see only what the model brings there.
        ends_early: End the pass after the range's last layer.
        cancelled: Asked before each layer.
        ends_at_head: End the pass where hidden states enter the head.
        last_only: The head computes the last position alone.
        head_inputs: What the head gets instead of what the model brings to it.
        captured: What the range's last layer gave, or what came to the head.
        placeholder_shape: What the injection saw the model bring, that is the boundary's shape.
        tuple_len: Items in what this model's layers return; None when they return the hidden states alone.
    """

    def __init__(self, tuple_len: int | None = None) -> None:
        self.injected: torch.Tensor | None = None
        self.peeking = False
        self.ends_early = False
        self.ends_at_head = False
        self.last_only = False
        self.head_inputs: torch.Tensor | None = None
        self.cancelled: Callable[[], bool] = _never
        self.captured: torch.Tensor | None = None
        self.placeholder_shape: torch.Size | None = None
        self.tuple_len = tuple_len

    def begin(
        self,
        *,
        injected: torch.Tensor | None,
        ends_early: bool,
        ends_at_head: bool = False,
        last_only: bool = False,
        cancelled: Callable[[], bool],
    ) -> None:
        """Set the stage for one pass."""
        self.injected, self.cancelled = injected, cancelled
        self.ends_early, self.ends_at_head, self.last_only = ends_early, ends_at_head, last_only

    def end(self) -> torch.Tensor | None:
        """Forget the pass; gives what was captured."""
        captured = self.captured
        self.injected, self.captured, self.cancelled = None, None, _never
        return captured

    def inject(self, placeholder: torch.Tensor) -> torch.Tensor:
        """The received hidden states in place of the model's own.

        Raises:
            StepFailed: `bad_step` when they do not have the shape that this model's layers pass on.
        """
        self.placeholder_shape = placeholder.shape
        if self.peeking:
            raise PassEnded
        if self.injected is None:
            raise ValueError("a pass over a range that is not first was begun without hidden states")
        if self.injected.shape != placeholder.shape:
            shape, expected = list(self.injected.shape), list(placeholder.shape)
            message = f"hidden_states has shape {shape}, this model's layers pass on {expected}"
            raise StepFailed("bad_step", message, field="hidden_states", shape=shape, expected=expected)
        return self.injected.to(placeholder.dtype)

    def wrap(self, hidden: torch.Tensor) -> Any:
        """Hidden states in the form in which this model's layers return them."""
        return hidden if self.tuple_len is None else (hidden, *(None,) * (self.tuple_len - 1))


class StandIn(nn.Module):
    """Takes a module's place. Attributes that the model reads of it are the original's, which stays on meta."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple, so that its parameters are not this model's

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_buffers", ()):  # let nn.Module answer for what it registered
            return super().__getattr__(name)
        return getattr(self.__dict__["_original"][0], name)


class PassThrough(StandIn):
    """A decoder layer that another node holds: gives its input."""

    def __init__(self, original: nn.Module, state: PassState) -> None:
        super().__init__(original)
        self._state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Accept whatever this model calls its layers with."""
        return self._state.wrap(args[0] if args else kwargs["hidden_states"])


class Injection(PassThrough):
    """The decoder layer just before the range: gives the hidden states that were received."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Accept whatever this model calls its layers with."""
        return self._state.wrap(self._state.inject(args[0] if args else kwargs["hidden_states"]))


class ZeroEmbedding(StandIn):
    """An input embedding whose output nobody uses: right shape, device and type."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__(original)
        self._hidden_size = original.weight.shape[-1]
        self.register_buffer("_like", torch.zeros(1, dtype=original.weight.dtype), persistent=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Zeros ``[*token_ids.shape, hidden_size]``."""
        like = cast(torch.Tensor, self._buffers["_like"])
        return like.new_zeros((*token_ids.shape, self._hidden_size))


class AbsentHead(StandIn):
    """An output head that another node holds."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Never reached: the pass ends before."""
        raise AssertionError("a range without the model's last layer has no head")


class AbsentPart(StandIn):
    """A part of the model for something else than text."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Never reached: nothing but text is ever given."""
        raise AssertionError("a range has nothing but the text part of its model")


def describe_model(model: PreTrainedModel, config: PreTrainedConfig, *, has_other_parts: bool = False) -> ModelOutline:
    """Find out how a model names its layers, embedding and head.

    Raises:
        LoadFailed: `model_unsupported` when it has no list of decoder layers, embedding or head.
    """
    num_layers: int | None = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if num_layers is None:
        raise unsupported(model, "its config does not say how many layers it has")
    paths = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not paths:
        raise unsupported(model, f"it has no list of {num_layers} decoder layers")
    embedding = _name_of(model, model.get_input_embeddings(), "input embedding")
    head = _name_of(model, model.get_output_embeddings(), "output head")  # type: ignore[no-untyped-call]
    # Beside the decoder's layers there may be as many in a part for images: those are farther from the embedding.
    near = {path: len(common_prefix(path, embedding)) if has_other_parts else 0 for path in paths}
    outline = ModelOutline(
        layer_list=max(paths, key=lambda path: (near[path], -path.count("."))),
        num_layers=num_layers,
        embedding=f"{embedding}.weight",
        head=f"{head}.weight",
        tied=f"{head}.weight" in model.all_tied_weights_keys,
        ties=dict(model.all_tied_weights_keys),
    )
    if not has_other_parts:
        return outline
    modules = (name for name, _ in model.named_modules())
    return replace(outline, other_parts=find_other_parts(modules, outline))


def windowed_class(
    model_class: type[PreTrainedModel], outline: ModelOutline, layers: LayerRange, state: PassState
) -> type[PreTrainedModel]:
    """The model's class, which opens the window as soon as it is built, before any weight is loaded."""

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        open_window(self, outline, layers, state)

    # The name and module of the original: transformers looks up weight conversions by them.
    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


def open_window(model: PreTrainedModel, outline: ModelOutline, layers: LayerRange, state: PassState) -> None:
    """Replace what the range does not need by stand-ins."""
    stack = decoder_layers(model, outline)
    for i, layer in enumerate(stack):
        if i not in layers:
            stack[i] = (Injection if i == layers.start - 1 else PassThrough)(layer, state)
    if not outline.embeds(layers):
        _replace(model, outline.embedding, ZeroEmbedding)
    if not outline.is_last(layers):
        _replace(model, outline.head, AbsentHead)
    for part in outline.other_parts:
        model.set_submodule(part, AbsentPart(model.get_submodule(part)))
    model.all_tied_weights_keys = outline.ties_within(layers)


def watch_layers(model: PreTrainedModel, outline: ModelOutline, layers: LayerRange, state: PassState) -> None:
    """Hook the held layers: cancellation before each, capture after the last."""
    stack = decoder_layers(model, outline)

    def stop_if_cancelled(_module: nn.Module, _args: Any) -> None:
        if state.cancelled():
            raise StepFailed("cancelled", "the step was cancelled while it ran")

    def capture(_module: nn.Module, _args: Any, output: Any) -> None:
        if state.ends_early:
            state.captured = output[0] if isinstance(output, tuple | list) else output
            raise PassEnded

    for i in range(layers.start, layers.end):
        stack[i].register_forward_pre_hook(stop_if_cancelled)
    stack[layers.end - 1].register_forward_hook(capture)


def decoder_layers(model: PreTrainedModel, outline: ModelOutline) -> nn.ModuleList:
    """The model's list of decoder layers, stand-ins included."""
    return cast(nn.ModuleList, model.get_submodule(outline.layer_list))


def _replace(model: PreTrainedModel, parameter: str, stand_in: Callable[[Any], StandIn]) -> None:
    path = parameter.removesuffix(".weight")
    model.set_submodule(path, stand_in(model.get_submodule(path)))


def _name_of(model: PreTrainedModel, wanted: nn.Module | None, what: str) -> str:
    for name, module in model.named_modules():
        if module is wanted:
            return str(name)
    raise unsupported(model, f"it has no {what}")


def unsupported(model: PreTrainedModel, why: str) -> LoadFailed:
    """The error for a model that cannot be served in ranges, and why."""
    name = type(model).__name__
    return LoadFailed("model_unsupported", f"{name} cannot be cut into layer ranges: {why}", architecture=name)


def _never() -> bool:
    return False
