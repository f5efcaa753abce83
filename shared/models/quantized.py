"""What weights take once a node has quantized them (`--quantize`), for planners without torch. Pure."""

from __future__ import annotations

from math import prod
from typing import Final

from shared.options import QUANTIZE_NONE

GROUP: Final = 64
"""Inputs of a matrix that share a scale in int4."""
OUT_STEP: Final = 16
"""int4's kernel lays out so many output features at a time."""
SCALE_BYTES: Final = 4
"""float32 beside each row of int8; in int4, scale and lowest value of each group in bfloat16."""
MATRIX_RANK: Final = 2


def fits_int4(out_features: int, in_features: int) -> bool:
    """Whether a matrix divides into int4's groups; int8 takes it otherwise."""
    return not in_features % GROUP and not out_features % OUT_STEP


def int8_bytes(out_features: int, in_features: int) -> int:
    """A matrix, or a table of vectors, with a scale for each row."""
    return out_features * (in_features + SCALE_BYTES)


def int4_bytes(out_features: int, in_features: int) -> int:
    """A matrix with a scale and a lowest value for each group."""
    return out_features * in_features // 2 + out_features * (in_features // GROUP) * SCALE_BYTES


def quantized_bytes(shape: tuple[int, ...], item_bytes: int, quantize: str) -> int:
    """What a layer's weight of this shape takes; only matrices are quantized."""
    if quantize == QUANTIZE_NONE or len(shape) != MATRIX_RANK:
        return prod(shape) * item_bytes
    return int4_bytes(*shape) if quantize == "int4" and fits_int4(*shape) else int8_bytes(*shape)
