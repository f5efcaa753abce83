"""Layer ranges: the half-open interval of decoder layers that one node holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Decoder layers ``[start, end)`` by absolute index.

    Raises:
        ValueError: If the range is empty or negative.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"layer range must satisfy 0 <= start < end, got [{self.start}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, layer_idx: object) -> bool:
        return isinstance(layer_idx, int) and self.start <= layer_idx < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read ``"0:12"``, the form that flags use.

        Raises:
            ValueError: If the text is not two integers joined by a colon, or they are no range.
        """
        start, colon, end = text.partition(":")
        if not colon or not start.isdecimal() or not end.isdecimal():
            raise ValueError(f"layer range must look like 0:12, got {text!r}")
        if int(start) >= int(end):
            raise ValueError(f"layer range {text} holds no layer: its start must be below its end")
        return cls(int(start), int(end))


def split_evenly(num_layers: int, parts: int) -> list[LayerRange]:
    """Cut ``[0, num_layers)`` into contiguous ranges whose sizes differ by at most one.

    Raises:
        ValueError: If there are more parts than layers, or no part at all.
    """
    if not 1 <= parts <= num_layers:
        raise ValueError(f"cannot cut {num_layers} layers into {parts} ranges")
    bounds = [round(i * num_layers / parts) for i in range(parts + 1)]
    return [LayerRange(a, b) for a, b in pairwise(bounds)]
