"""Routes: the hops that cover every decoder layer of a model exactly once, in order."""

from __future__ import annotations

from dataclasses import dataclass

from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class Hop:
    """One visit of one node: `node` is its id, `layers` what it computes there."""

    node: str
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Route:
    """Hops in the order in which hidden states travel.

    Raises:
        ValueError: If the hops leave a gap, overlap, or do not start at layer 0.
    """

    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        expected = 0
        for hop in self.hops:
            if hop.layers.start != expected:
                raise ValueError(f"hop {hop.node} starts at layer {hop.layers.start}, expected {expected}")
            expected = hop.layers.end
        if not self.hops:
            raise ValueError("a route needs at least one hop")

    def __len__(self) -> int:
        return len(self.hops)

    @property
    def num_layers(self) -> int:
        """How many decoder layers the route covers."""
        return self.hops[-1].layers.end
