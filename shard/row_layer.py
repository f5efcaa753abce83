"""A decoder layer's step of one row, on kernels of our own from its input to its output.

A decoded token meets some twenty operators in each layer beside the matrices, and most of their time is Python's and
torch's dispatch: a quarter of a step of a small model. Here a layer is one compiled function before torch's
attention and one after it. It rounds where transformers' own layer rounds, so results are the same to the bit.

Whatever is not one row of bfloat16 with a cache goes to the layer's own forward. Which layers are taken over:
`shard.layer_takeover`.

Shapes: H = query heads, G = key/value heads, D = head size.
"""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

import torch
from torch import nn

from shard.attention import attend_as_rows
from shard.kv_layers import GrowingLayer, WindowLayer
from shard.layer_code import Reference
from shard.linear.native import LayerParts, Norm, native_kernels
from shard.linear.rows import RowKernel
from shard.session_cache import RangeCache

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers' layers call their cache: the second before 5.24."""
KNOWN = {"attention_mask", "position_embeddings", "position_ids", "use_cache", "cache_position", *CACHE_NAMES}
"""What a layer may be called with. Mask, embeddings and cache matter; attention gets the others, and asks for none."""


class Room:
    """What the layers of one stage write into between their kernels, one layer after the other."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], torch.Tensor] = {}
        self._embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
        self._head_dim = 0
        self._tables: dict[type[nn.Module], torch.Tensor] = {}

    def take(self, name: str, size: int) -> torch.Tensor:
        """``[size]`` in bfloat16, the same for every layer that asks for it."""
        return self._held.setdefault((name, size), torch.empty(size, dtype=torch.bfloat16))

    def knows(self, embeddings: Any, head_dim: int) -> bool:
        """Whether kernels can read cosines and sines; all layers of a step bring the same ones."""
        if embeddings is None or not (embeddings is self._embeddings and head_dim == self._head_dim):
            if embeddings is None or not all(each.numel() == head_dim and is_plain(each) for each in embeddings):
                return False
            self._embeddings, self._head_dim = embeddings, head_dim
        return True

    def table(self, activation: nn.Module) -> torch.Tensor:
        """An activation's value for each of the 65,536 values of bfloat16, by their bits; its type says all of it."""
        if type(activation) not in self._tables:
            bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).roll(2**15)
            with torch.inference_mode():
                self._tables[type(activation)] = activation(bits.view(torch.bfloat16))
        return self._tables[type(activation)]


class RowLayer:
    """One decoder layer. `forward` takes its place.

    Args:
        layer: What `reference_of` has found to be the reference's.
        reference: The model that it is like.
        room: That of the layer's stage.
    """

    def __init__(self, layer: nn.Module, reference: Reference, room: Room) -> None:
        held: Any = layer
        attention, mlp = held.self_attn, held.mlp
        self._original = layer.forward
        names = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
        self.cache_name = next(name for name in CACHE_NAMES if name in names)
        self._index: int = attention.layer_idx
        self.head_dim, self.hidden_size = attention.head_dim, attention.q_proj.in_features
        self._scaling: float = attention.scaling
        self._kernels, self._room = native_kernels(), room
        self._query, self._key, self._value = (
            room.take(name, linear.out_features).view(1, -1, 1, self.head_dim)
            for name, linear in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj))
        )
        self._heads = self._query.view(1, self._key.shape[1], -1, self.head_dim)
        linears = [module for module in layer.modules() if isinstance(module, RowKernel)]
        self._parts = LayerParts(
            query=attention.q_proj.product(),
            key=attention.k_proj.product(),
            value=attention.v_proj.product(),
            output=attention.o_proj.product(),
            gate=mlp.gate_proj.product(),
            up=mlp.up_proj.product(),
            down=mlp.down_proj.product(),
            norm_before=_norm(held.input_layernorm),
            norm_between=_norm(held.post_attention_layernorm),
            norm_query=_norm(attention.q_norm) if reference.norms_heads else Norm(),
            norm_key=_norm(attention.k_norm) if reference.norms_heads else Norm(),
            table=room.table(mlp.act_fn).data_ptr(),
            row=room.take("row", self.hidden_size).data_ptr(),
            queries=self._query.data_ptr(),
            keys=self._key.data_ptr(),
            values=self._value.data_ptr(),
            gates=room.take("gates", mlp.gate_proj.out_features).data_ptr(),
            passed=room.take("passed", mlp.up_proj.out_features).data_ptr(),
            scratch=room.take("scratch", 2 * max(linear.scratch_floats for linear in linears)).data_ptr(),
            half_head=self.head_dim // 2,
            lanes=16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8,
        )
        self._parts_at = ctypes.addressof(self._parts)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        cache: Any = kwargs.get(self.cache_name)
        if args or not self._takes(hidden_states, cache, kwargs):
            return self._original(hidden_states, *args, **kwargs)
        cos, sin = kwargs["position_embeddings"]
        threads, hidden = torch.get_num_threads(), hidden_states.data_ptr()
        self._kernels.before_attention(self._parts_at, hidden, cos.data_ptr(), sin.data_ptr(), threads)
        keys, values = cache.update(self._key, self._value, self._index)
        attended = attend_as_rows(self._heads, keys, values, kwargs.get("attention_mask"), self._scaling).reshape(-1)
        outputs = torch.empty_like(hidden_states)
        self._kernels.after_attention(self._parts_at, hidden, attended.data_ptr(), outputs.data_ptr(), threads)
        return outputs

    def _takes(self, hidden_states: torch.Tensor, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Whether it is one row, as this computes it."""
        if hidden_states.numel() != self.hidden_size or not is_plain(hidden_states) or not kwargs.keys() <= KNOWN:
            return False
        if not isinstance(cache, RangeCache) or type(cache.layers[self._index]) not in (GrowingLayer, WindowLayer):
            return False
        mask, embeddings = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
        return (mask is None or mask.shape[1] == 1) and self._room.knows(embeddings, self.head_dim)


def _norm(norm: Any) -> Norm:
    return Norm(weight=norm.weight.data_ptr(), size=norm.weight.numel(), epsilon=norm.variance_epsilon)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether kernels can read it where it is."""
    return tensor.dtype is torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu"
