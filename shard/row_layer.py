"""A decoder layer's step of one row, on kernels of our own from its input to its output.

A decoded token meets some twenty operators in each layer beside the matrices, and most of their time is Python's and
torch's dispatch: a quarter of a step of a small model. Here a layer is a dozen calls of compiled functions between
addresses, and torch's attention. It rounds where transformers' own layer rounds, so results are the same to the bit.

Whatever is not one row of bfloat16 with a cache goes to the layer's own forward. Which layers are taken over:
`shard.layer_takeover`.

Shapes: H = query heads, G = key/value heads, D = head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shard.attention import attend_as_rows
from shard.kv_layers import GrowingLayer, WindowLayer
from shard.layer_code import Reference
from shard.linear.native import native_kernels, scratch_address
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


class Linear:
    """A linear layer between addresses."""

    def __init__(self, linear: RowKernel) -> None:
        self.ins, self.outs = linear.in_features, linear.out_features
        self.write = linear.row_writer()
        self._bias = None if linear.bias is None else linear.bias.contiguous()
        self.bias_at = None if self._bias is None else self._bias.data_ptr()


class Norm:
    """An RMS norm's weight and its epsilon."""

    def __init__(self, norm: Any) -> None:
        self._weight: torch.Tensor = norm.weight.detach().contiguous()
        self.weight_at, self.size = self._weight.data_ptr(), self._weight.numel()
        self.epsilon: float = norm.variance_epsilon


class RowLayer:
    """One decoder layer. `forward` takes its place.

    Args:
        layer: What `reference_of` has found to be the reference's.
        reference: The model that it is like.
        room: That of the layer's stage.
    """

    def __init__(self, layer: nn.Module, reference: Reference, room: Room) -> None:
        parts: Any = layer
        attention, mlp = parts.self_attn, parts.mlp
        self._original = layer.forward
        names = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
        self.cache_name = next(name for name in CACHE_NAMES if name in names)
        self._index: int = attention.layer_idx
        self.head_dim, self._scaling = attention.head_dim, attention.scaling
        self._kernels = native_kernels()
        self._lanes = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
        self._table = room.table(mlp.act_fn)
        self._norm_before, self._norm_between = Norm(parts.input_layernorm), Norm(parts.post_attention_layernorm)
        self._norms = (Norm(attention.q_norm), Norm(attention.k_norm)) if reference.norms_heads else None
        self._q, self._k, self._v = Linear(attention.q_proj), Linear(attention.k_proj), Linear(attention.v_proj)
        self._o = Linear(attention.o_proj)
        self._gate, self._up, self._down = Linear(mlp.gate_proj), Linear(mlp.up_proj), Linear(mlp.down_proj)
        self.hidden_size = self._q.ins
        self._query, self._key, self._value = (
            room.take(name, linear.outs).view(1, -1, 1, self.head_dim)
            for name, linear in (("query", self._q), ("key", self._k), ("value", self._v))
        )
        self._heads = self._query.view(1, self._key.shape[1], -1, self.head_dim)
        self._room, self._row = room, room.take("row", self.hidden_size)
        self._gates, self._values = room.take("gates", self._gate.outs), room.take("values", self._up.outs)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        cache: Any = kwargs.get(self.cache_name)
        if args or not self._takes(hidden_states, cache, kwargs):
            return self._original(hidden_states, *args, **kwargs)
        cos, sin = kwargs["position_embeddings"]
        attended = self._attend(hidden_states, cos, sin, cache, kwargs.get("attention_mask"))
        outputs = torch.empty_like(hidden_states)
        out, row = outputs.data_ptr(), self._row.data_ptr()
        self._multiply(self._o, attended.data_ptr(), out)
        self._kernels.add_bf16(out, hidden_states.data_ptr(), self.hidden_size)
        self._normalize(self._norm_between, out, row)
        self._feed_forward(row)
        self._kernels.add_bf16(out, row, self.hidden_size)
        return outputs

    def _takes(self, hidden_states: torch.Tensor, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Whether it is one row, as this computes it."""
        if hidden_states.numel() != self.hidden_size or not is_plain(hidden_states) or not kwargs.keys() <= KNOWN:
            return False
        if not isinstance(cache, RangeCache) or type(cache.layers[self._index]) not in (GrowingLayer, WindowLayer):
            return False
        mask, embeddings = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
        return (mask is None or mask.shape[1] == 1) and self._room.knows(embeddings, self.head_dim)

    def _attend(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: RangeCache, mask: Any
    ) -> torch.Tensor:
        """What enters the output projection, ``[H * D]``."""
        row = self._row.data_ptr()
        query, key, value = self._query.data_ptr(), self._key.data_ptr(), self._value.data_ptr()
        self._normalize(self._norm_before, hidden_states.data_ptr(), row)
        self._multiply(self._q, row, query)
        self._multiply(self._k, row, key)
        self._multiply(self._v, row, value)
        if self._norms is not None:
            for norm, states in zip(self._norms, (self._query, self._key), strict=True):
                self._normalize(norm, states.data_ptr(), states.data_ptr(), states.shape[1])
        angles = cos.data_ptr(), sin.data_ptr()
        self._kernels.rotate_bf16(query, *angles, self._query.shape[1], self.head_dim // 2)
        self._kernels.rotate_bf16(key, *angles, self._key.shape[1], self.head_dim // 2)
        keys, values = cache.update(self._key, self._value, self._index)
        return attend_as_rows(self._heads, keys, values, mask, self._scaling).reshape(-1)

    def _feed_forward(self, row: int) -> None:
        """In place."""
        gates, values = self._gates.data_ptr(), self._values.data_ptr()
        self._multiply(self._gate, row, gates)
        self._multiply(self._up, row, values)
        self._kernels.gate_bf16(gates, self._table.data_ptr(), values, self._up.outs)
        self._multiply(self._down, values, row)

    def _multiply(self, linear: Linear, inputs: int, outputs: int) -> None:
        linear.write(inputs, outputs)
        if linear.bias_at is not None:
            self._kernels.add_bf16(outputs, linear.bias_at, linear.outs)

    def _normalize(self, norm: Norm, inputs: int, outputs: int, rows: int = 1) -> None:
        scratch = scratch_address(norm.size)
        at = (inputs, norm.weight_at, scratch, outputs)
        self._kernels.norm_bf16(*at, rows, norm.size, norm.epsilon, self._lanes)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether kernels can read it where it is."""
    return tensor.dtype is torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu"
