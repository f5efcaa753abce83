"""Why machines cannot hold a model, in a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shared.planning.chain import MIDDLE, Chain
from shared.planning.cost import CostModel
from shared.planning.fleet import Machine
from shared.planning.units import size_text


def why_impossible(costs: CostModel, machines: Sequence[Machine], chain: Chain) -> str:
    """Name what is missing: memory for one piece that cannot be cut, memory in all, or memory in the right places."""
    rooms = [max(0, terms.room_bytes[MIDDLE]) for terms in chain.nodes]
    pieces = [
        (after - before, start, end)
        for (before, after), (start, end) in zip(pairwise(chain.bytes_before), pairwise(chain.cuts), strict=True)
    ]
    size, start, end = max(pieces)
    roomiest = max(range(len(machines)), key=lambda node: rooms[node])
    if size > rooms[roomiest]:
        what = (
            f"layer {start} takes" if end == start + 1 else f"layers {start}:{end}, which this model cannot cut, take"
        )
        return (
            f"{what} {size_text(size)} with its caches, and {machines[roomiest].name}, the roomiest machine, has "
            f"{size_text(rooms[roomiest])} for layers{_remedy(costs)}"
        )
    model = costs.model
    needed = chain.bytes_before[-1] + model.embedding_bytes + (0 if model.is_tied else model.head_bytes)
    if needed > sum(rooms):
        return (
            f"the model takes {size_text(needed)} with its caches, and the {len(machines)} machines have "
            f"{size_text(sum(rooms))} for it in all{_remedy(costs)}"
        )
    ends = f"embedding {size_text(model.embedding_bytes)}, head {size_text(model.head_bytes)}"
    return (
        f"the machines have {size_text(sum(rooms))} for the model's {size_text(needed)}, but no placement of its "
        f"pieces was found: layers of up to {size_text(size)}, {ends} beside the first and the last of them"
        f"{_remedy(costs)}"
    )


def _remedy(costs: CostModel) -> str:
    demand = costs.demand
    return (
        f" ({demand.sessions} sessions of {demand.context_len} tokens): add memory or machines, or ask for fewer "
        "sessions or a shorter context"
    )
