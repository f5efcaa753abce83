"""Why machines cannot hold a model, in a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shared.planning.chain import MIDDLE, Chain
from shared.planning.cost import CostModel
from shared.planning.fleet import Machine
from shared.planning.units import size_text


def why_impossible(costs: CostModel, machines: Sequence[Machine], chain: Chain) -> str:
    """Name what is missing: memory for one piece that cannot be cut, memory in all, or memory in the right places.

    Where machines hold the model in several ways, its sizes are those on the roomiest one.
    """
    rooms = [max(0, terms.room_bytes[MIDDLE]) for terms in chain.nodes]
    roomiest = max(range(len(machines)), key=lambda node: rooms[node])
    machine, before = machines[roomiest], chain.nodes[roomiest].bytes_before
    model = costs.on(machine).model
    held = f" in {model.precision}" if model.dtype else ""
    size, start, end = max(
        (high - low, start, end)
        for (low, high), (start, end) in zip(pairwise(before), pairwise(chain.cuts), strict=True)
    )
    if size > rooms[roomiest]:
        what = (
            f"layer {start} takes" if end == start + 1 else f"layers {start}:{end}, which this model cannot cut, take"
        )
        return (
            f"{what} {size_text(size)}{held} with its caches, and {machine.name}, the roomiest machine, has "
            f"{size_text(rooms[roomiest])} for layers{_beside(machines)}{_remedy(costs)}"
        )
    needed = before[-1] + model.embedding_bytes + (0 if model.is_tied else model.head_bytes)
    if needed > sum(rooms):
        return (
            f"the model takes {size_text(needed)}{held} with its caches, and the {len(machines)} machines have "
            f"{size_text(sum(rooms))} for it in all{_beside(machines)}{_remedy(costs)}"
        )
    ends = f"embedding {size_text(model.embedding_bytes)}, head {size_text(model.head_bytes)}"
    return (
        f"the machines have {size_text(sum(rooms))}{_beside(machines)} for the model's {size_text(needed)}{held}, but "
        f"no placement of its pieces was found: layers of up to {size_text(size)}, {ends} beside the first and the "
        f"last of them{_remedy(costs)}"
    )


def _beside(machines: Sequence[Machine]) -> str:
    """What is not for layers: the process itself, and what its steps work in."""
    least, most = (pick(machine.runtime_bytes for machine in machines) for pick in (min, max))
    sizes = size_text(least) if size_text(least) == size_text(most) else f"{size_text(least)} to {size_text(most)}"
    return f" beside the {sizes} that each node's own process takes and what a step works in"


def _remedy(costs: CostModel) -> str:
    demand = costs.demand
    return (
        f" ({demand.sessions} sessions of {demand.context_len} tokens): add memory or machines, ask for fewer sessions "
        "or a shorter context, or hold the weights in fewer bits (--quantize)"
    )
