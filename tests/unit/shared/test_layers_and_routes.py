"""Layer ranges and routes: what they are, how they are cut, what is none."""

from __future__ import annotations

import pytest

from shared.layers import LayerRange, split_evenly
from shared.route import Hop, Route


@pytest.mark.parametrize(("start", "end"), [(0, 0), (2, 1), (-1, 1)])
def test_a_range_is_never_empty_or_negative(start: int, end: int):
    """A node always holds at least one layer."""
    with pytest.raises(ValueError, match="layer range"):
        LayerRange(start, end)


def test_a_range_reads_and_writes_the_form_of_flags():
    """`str` and `parse` are each other's inverse."""
    layers = LayerRange.parse("3:12")
    assert (layers, str(layers), len(layers), 3 in layers, 12 in layers) == (LayerRange(3, 12), "3:12", 9, True, False)


@pytest.mark.parametrize("text", ["", "3", "a:b", "3:", "-1:4", "4:3", "1:2:3", "1.0:2"])
def test_what_is_no_range_is_refused(text: str):
    """Anything but two integers in order is a `ValueError`."""
    with pytest.raises(ValueError, match="layer range"):
        LayerRange.parse(text)


@pytest.mark.parametrize("num_layers", [1, 5, 24, 61])
def test_an_even_split_covers_every_layer_once(num_layers: int):
    """For every number of parts: contiguous, complete, sizes differ by at most one."""
    for parts in range(1, num_layers + 1):
        ranges = split_evenly(num_layers, parts)
        assert [layer for r in ranges for layer in range(r.start, r.end)] == list(range(num_layers))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    with pytest.raises(ValueError, match="cannot cut"):
        split_evenly(num_layers, num_layers + 1)


def test_a_route_covers_every_layer_once_in_order():
    """Gaps, overlaps, another start and no hop at all are refused."""
    route = Route((Hop("a", LayerRange(0, 2)), Hop("b", LayerRange(2, 3))))
    assert (len(route), route.num_layers) == (2, 3)
    for hops in (
        (),
        (Hop("a", LayerRange(1, 2)),),
        (*route.hops, Hop("c", LayerRange(4, 5))),
        (*route.hops, *route.hops),
    ):
        with pytest.raises(ValueError, match="hop"):
            Route(hops)
