"""Which layers of a stage run their steps of one row as `RowLayer`.

A layer is taken over where its code says that it is the same function (`shard.layer_code`), and its parts are such as
kernels take. Then one of them is run both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.modeling_utils import PreTrainedModel

from shard.attention import ATTENTION
from shard.layer_code import reference_of
from shard.linear.native import native_absence
from shard.linear.rows import RowKernel
from shard.model_outline import ModelOutline
from shard.row_layer import Room, RowLayer, is_plain
from shard.session_cache import StageCache
from shard.window import decoder_layers
from shared.layers import LayerRange

log = structlog.get_logger(__name__)

LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ACTIVATIONS = (nn.SiLU, SiLUActivation)
"""Functions of one element, without attributes of their own: a table holds them."""
NORM_SIZE_MIN = 16
"""torch sums shorter rows in another way."""
PROBE_POSITIONS = 5
TOLERANCE = 0.02
"""Largest difference in what a layer adds, relative: on other processors torch may sum in another order."""


def take_over_layers(model: PreTrainedModel, outline: ModelOutline, layers: LayerRange, dtype: torch.dtype) -> int:
    """Give the range's layers their steps of one row, where they are what `RowLayer` computes; says how many are.

    The caller hooks the layers afterwards.
    """
    if dtype is not torch.bfloat16 or native_absence() is not None:
        return 0
    room = Room()
    stack = decoder_layers(model, outline)
    found: list[tuple[nn.Module, RowLayer]] = []
    for layer in (stack[i] for i in range(layers.start, layers.end)):
        reference = reference_of(layer)
        if reference is not None and _is_computable(layer):
            found.append((layer, RowLayer(layer, reference, room)))
    if not found or not _agrees(model, layers, *found[0]):
        return 0
    for layer, row_layer in found:
        layer.forward = row_layer.forward
    return len(found)


def _is_computable(layer: Any) -> bool:
    """Whether its parts are of the kinds, types and shapes that kernels take."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = {name.rpartition(".")[2]: part for name, part in layer.named_modules() if isinstance(part, RowKernel)}
    norms = [part for part in layer.modules() if hasattr(part, "variance_epsilon")]
    return (
        set(linears) == LINEARS
        and attention.config._attn_implementation == ATTENTION  # noqa: SLF001 - as attention itself asks
        and type(mlp.act_fn) in ACTIVATIONS
        and attention.head_dim % 2 == 0
        and all(linear.bias is None or is_plain(linear.bias) for linear in linears.values())
        and all(is_plain(norm.weight) and norm.weight.numel() >= NORM_SIZE_MIN for norm in norms)
    )


def _agrees(model: PreTrainedModel, layers: LayerRange, layer: nn.Module, row_layer: RowLayer) -> bool:
    """Whether a layer adds the same to a row both ways."""
    own = _probe(model, layers, layer.forward, row_layer)
    ours = _probe(model, layers, row_layer.forward, row_layer)
    difference = float(torch.linalg.vector_norm(ours - own) / torch.linalg.vector_norm(own))
    agrees = difference <= TOLERANCE  # false also for what is not a number
    if not agrees:
        log.warning("layers.differ", architecture=type(model).__name__, difference=difference)
    return agrees


def _probe(
    model: PreTrainedModel, layers: LayerRange, forward: Callable[..., torch.Tensor], row_layer: RowLayer
) -> torch.Tensor:
    """What a layer adds to the last of a few positions, which is a step of its own."""
    cache = StageCache(model.config, layers).begin()
    hidden_states, cos, sin = (
        torch.randn((1, PROBE_POSITIONS, size), generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed, size in enumerate((row_layer.hidden_size, row_layer.head_dim, row_layer.head_dim))
    )
    added = hidden_states
    others: dict[str, Any] = {"attention_mask": None, row_layer.cache_name: cache}
    with torch.inference_mode():
        for part in (slice(0, -1), slice(-1, None)):
            embeddings = cos[:, part].contiguous(), sin[:, part].contiguous()
            row = hidden_states[:, part].contiguous()
            added = forward(row, position_embeddings=embeddings, **others) - row
    return added.float()
