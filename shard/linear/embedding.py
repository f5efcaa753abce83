"""Input embeddings in fewer bits: in int8 what is looked up differs by less than 0.4 %, in int4 by some percent."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from shard.linear.int4 import pack_groups, unpack_groups
from shard.linear.int8 import quantize_rows
from shard.linear.packed import BLOCK_ELEMENTS
from shared.models.quantized import fits_int4, int4_bytes, int8_bytes


class PackedEmbedding(nn.Module, ABC):
    """A table of token vectors with scales of its own for each token.

    Args:
        weight: ``[vocabulary, hidden_size]`` on the CPU; not kept.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self._dtype = weight.dtype
        blocks = torch.split(weight, max(1, BLOCK_ELEMENTS // self.embedding_dim))
        parts = [self._pack(block) for block in blocks]
        self._rows = torch.cat([rows for rows, _ in parts])
        self._scales = torch.cat([scales for _, scales in parts])
        self.nbytes = self._rows.nbytes + self._scales.nbytes

    @staticmethod
    @abstractmethod
    def _pack(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and their scales."""

    @staticmethod
    @abstractmethod
    def _unpack(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Any of them as float32."""

    @property
    def weight(self) -> torch.Tensor:
        """The plain table, made anew each time."""
        return self._unpack(self._rows, self._scales).to(self._dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[...]`` to ``[..., hidden_size]``."""
        return self._unpack(self._rows[token_ids], self._scales[token_ids]).to(self._dtype)


class Int8Embedding(PackedEmbedding):
    """One scale for each token."""

    @staticmethod
    def _pack(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(block)

    @staticmethod
    def _unpack(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return rows * scales


class Int4Embedding(PackedEmbedding):
    """Groups, as linear layers have them."""

    @staticmethod
    def _pack(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pack_groups(block)

    @staticmethod
    def _unpack(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return unpack_groups(rows, scales)


def embedding_kind(shape: tuple[int, ...], *, four_bits: bool) -> type[PackedEmbedding]:
    """Four bits where they are wanted and the table divides into groups, else eight."""
    return Int4Embedding if four_bits and fits_int4(*shape) else Int8Embedding


def embedding_bytes(shape: tuple[int, ...], *, four_bits: bool) -> int:
    """What a table of this shape will take."""
    return int4_bytes(*shape) if embedding_kind(shape, four_bits=four_bits) is Int4Embedding else int8_bytes(*shape)
