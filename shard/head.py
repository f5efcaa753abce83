"""The place where hidden states enter the output head: a pass may end there, and what was taken may enter later.

So a step can be embedded without any logits, and scored a few positions at a time: the logits of a whole prompt
at once would take more memory than its layers. The second time, decoder layers are skipped and the head is given
what was taken before; whatever the model does between its last layer and its logits stays its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from shard.model_outline import ModelOutline
from shard.window import PassEnded, PassState, PassThrough, decoder_layers


def watch_head(model: PreTrainedModel, outline: ModelOutline, state: PassState) -> None:
    """Hook the head of a range that has it: see `PassState.ends_at_head`, `head_inputs` and `last_only`."""

    def enter(_module: nn.Module, args: Any) -> Any:
        if state.head_inputs is not None:
            return (state.head_inputs, *args[1:])
        if state.ends_at_head:
            state.captured = args[0]
            raise PassEnded
        return (args[0][:, -1:], *args[1:]) if state.last_only else None

    model.get_submodule(outline.head_module).register_forward_pre_hook(enter)


@contextmanager
def head_alone(
    model: PreTrainedModel, outline: ModelOutline, state: PassState, head_inputs: torch.Tensor
) -> Iterator[None]:
    """Within, a forward skips all decoder layers, and its head gets these inputs."""
    layers = decoder_layers(model, outline)
    held = list(layers)
    for i, layer in enumerate(held):
        layers[i] = PassThrough(layer, state)
    state.head_inputs = head_inputs
    try:
        yield
    finally:
        state.head_inputs = None
        for i, layer in enumerate(held):
            layers[i] = layer
