"""Which ranges, one behind the other, cover which layers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shared.layers import LayerRange


def covers(ranges: Iterable[LayerRange], num_layers: int) -> bool:
    """Whether some of these ranges, one behind the other, cover all layers exactly once."""
    reached = {0}
    for layers in sorted(set(ranges)):
        if layers.start in reached:
            reached.add(layers.end)
    return num_layers in reached


def best_chain(ranges: Iterable[LayerRange], num_layers: int) -> list[LayerRange]:
    """Ranges in order that do not overlap and cover the most layers; of equals, the fewest."""
    best: dict[int, tuple[int, int, list[LayerRange]]] = {0: (0, 0, [])}
    distinct = sorted(set(ranges))
    for position in range(1, num_layers + 1):
        covered, hops, chain = best[position - 1]
        options = [(covered, hops, chain)]
        for layers in distinct:
            if layers.end == position:
                before, hops_before, chain_before = best[layers.start]
                options.append((before + len(layers), hops_before - 1, [*chain_before, layers]))
        best[position] = max(options, key=lambda option: option[:2])
    return best[num_layers][2]


def gaps(chain: Iterable[LayerRange], num_layers: int) -> list[LayerRange]:
    """What a chain leaves uncovered, in order."""
    missing, reached = [], 0
    for layers in [*chain, None]:
        start = num_layers if layers is None else layers.start
        if reached < start:
            missing.append(LayerRange(reached, start))
        if layers is not None:
            reached = layers.end
    return missing
