"""An embedding, pooled from what the steps of a prefill answer."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping

from gateway.probe import Asked
from shared.errors import StepFailed
from shared.messages import Pooling
from shared.tensor_spec import WireTensor


class EmbeddingPool:
    """A `gateway.probe.Probe` that adds up positions, each once, or keeps the last.

    Args:
        length: Positions of the whole input.
        pooling: What to make of them.
    """

    def __init__(self, length: int, pooling: Pooling) -> None:
        self._length = length
        self._pooling = pooling
        self._pooled: list[float] = []
        self._pooled_len = 0

    def ask(self, start: int, new_len: int) -> Asked | None:
        """The step's part; of the last position alone where only that counts."""
        if self._pooling == "last" and start + new_len < self._length:
            return None
        return Asked(pool=self._pooling)

    def take(self, start: int, new_len: int, tensors: Mapping[str, WireTensor]) -> None:
        """Add a step's part to those of the positions before it; from position 0 on everything counts anew.

        Raises:
            StepFailed: `bad_answer`.
            ValueError: The step does not follow the one before: a fault of ours.
        """
        part = _read_vector(tensors.get("embedding"))
        if not start or self._pooling == "last":
            self._pooled = part
        elif start != self._pooled_len:
            raise ValueError(f"positions [0, {self._pooled_len}) are pooled, and the step starts at {start}")
        elif len(part) != len(self._pooled):
            raise StepFailed("bad_answer", f"embedding has {len(part)} values after {len(self._pooled)}")
        else:
            self._pooled = [total + value for total, value in zip(self._pooled, part, strict=True)]
        self._pooled_len = start + new_len

    def vector(self) -> tuple[float, ...]:
        """The embedding, as f32 values; once every position has been taken in.

        Raises:
            ValueError: It is not complete.
        """
        if self._pooled_len != self._length:
            raise ValueError(f"{self._pooled_len} of {self._length} positions are pooled")
        count = self._length if self._pooling == "mean" else 1
        return tuple(array("f", [total / count for total in self._pooled]))


def _read_vector(tensor: WireTensor | None) -> list[float]:
    if tensor is None or tensor.dtype != "f32" or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise StepFailed("bad_answer", "the last hop must answer with an embedding as f32 [hidden_size]")
    values = list(struct.unpack(f"<{tensor.shape[0]}f", tensor.data))
    if not all(map(math.isfinite, values)):
        raise StepFailed("bad_answer", "the last hop answered with an embedding that is not finite")
    return values
