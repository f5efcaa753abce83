"""Log-probabilities as a last hop returns them, read and checked."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from gateway.generation_request import TokenLogprobs
from shared.errors import StepFailed
from shared.tensor_spec import WireTensor

TOKEN_ID_MAX = 2**31 - 1
"""Token ids travel as i32: the bound where a model does not say how many it has."""
LOGPROB_MAX = 1e-3
"""No probability is above 1; a sum of rounded exponentials may say so by a little."""


def read_rows(
    tensors: Mapping[str, WireTensor], *, rows: int, top: int, vocab_size: int | None
) -> list[tuple[int, TokenLogprobs]]:
    """Each row's own token id, and the log-probabilities at its place.

    Args:
        tensors: Of the result: `logprobs` and `logprob_ids`, each ``[rows, 1 + top]``.
        rows: How many there must be.
        top: How many of the likeliest each must name.
        vocab_size: Entries of the model's vocabulary; None where that is not known.

    Raises:
        StepFailed: `bad_answer`: a tensor is missing, of another type or shape, or holds what no model gives.
    """
    width = 1 + top
    values = _read(tensors, "logprobs", "f32", (rows, width))
    ids = _read(tensors, "logprob_ids", "i32", (rows, width))
    if not all(value <= LOGPROB_MAX for value in values):
        raise StepFailed("bad_answer", "logprobs must be at most 0")
    if not (is_token(min(ids, default=0), vocab_size) and is_token(max(ids, default=0), vocab_size)):
        raise StepFailed("bad_answer", "logprob_ids must be of the model's vocabulary")
    return [_row(ids[at : at + width], values[at : at + width]) for at in range(0, rows * width, width)]


def is_token(token_id: int, vocab_size: int | None) -> bool:
    """Whether a model of this vocabulary, or of one that is not known, can have this token."""
    return 0 <= token_id <= (TOKEN_ID_MAX if vocab_size is None else vocab_size - 1)


def _row(ids: tuple[int, ...], values: tuple[float, ...]) -> tuple[int, TokenLogprobs]:
    return ids[0], TokenLogprobs(values[0], tuple(zip(ids[1:], values[1:], strict=True)))


def _read(tensors: Mapping[str, WireTensor], name: str, dtype: str, shape: tuple[int, int]) -> tuple[Any, ...]:
    tensor = tensors.get(name)
    if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
        raise StepFailed("bad_answer", f"the last hop must answer with {name} as {dtype} {list(shape)}")
    return struct.unpack(f"<{shape[0] * shape[1]}{'f' if dtype == 'f32' else 'i'}", tensor.data)
