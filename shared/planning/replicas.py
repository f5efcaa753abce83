"""Second copies of a range, on machines that the route leaves over.

A gateway shares sessions evenly between copies, whatever their pace, so a copy is worth having only if an answer on it
is not much slower, and (for `throughput`) if the copies together are no slower than the route's slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shared.planning.chain import Chain, Placed, Placement, bottleneck_of, latency_of
from shared.planning.fleet import Objective

SLOWDOWN_MAX: Final = 1.5
"""How much longer a token may take over a replica: sessions get it in turn, not only when a machine is lost."""

Replicas = dict[int, list[int]]
"""Stage → nodes that also hold its range."""


def effective_busy_s(busy_s: Sequence[float]) -> float:
    """How often copies together take a token, when sessions are shared evenly: the slowest sets their pace."""
    return max(busy_s) / len(busy_s)


def choose_replicas(chain: Chain, placement: Placement, objective: Objective) -> Replicas:
    """Give every machine left over the stage that needs a copy most: those that fit few stages first.

    `latency` sees to it that every range has a second copy before any has a third; `throughput` that the slowest stage
    is relieved first. This is a greedy choice, not an optimal one.
    """
    used = {item.node for item in placement}
    free = [node for node in range(len(chain.nodes)) if node not in used]
    options = {node: able_stages(chain, placement, node) for node in free}
    busy_s = [[chain.busy_s(item.node, item.start, item.end)] for item in placement]
    slowest_s = bottleneck_of(chain, placement)
    chosen: Replicas = {}

    def need(stage: int) -> tuple[float, float, int]:
        copies, pace = len(busy_s[stage]), effective_busy_s(busy_s[stage])
        return (copies, -pace, stage) if objective == "latency" else (-pace, copies, stage)

    for node in sorted(free, key=lambda node: (len(options[node]), node)):
        for stage in sorted(options[node], key=need):
            own_s = chain.busy_s(node, placement[stage].start, placement[stage].end)
            if objective == "latency" or effective_busy_s([*busy_s[stage], own_s]) <= slowest_s:
                busy_s[stage].append(own_s)
                chosen.setdefault(stage, []).append(node)
                break
    return chosen


def able_stages(chain: Chain, placement: Placement, node: int) -> list[int]:
    """Stages whose range a machine has memory for and computes alike, and on which an answer is not much slower."""
    token_s = latency_of(chain, placement)
    return [
        stage
        for stage, item in enumerate(placement)
        if chain.nodes[node].precision == chain.nodes[item.node].precision
        and chain.fits(node, item.start, item.end)
        and token_s + slower_by_s(chain, item, node) <= SLOWDOWN_MAX * token_s
    ]


def slower_by_s(chain: Chain, item: Placed, node: int) -> float:
    """How much longer a token takes when another node stands in for a stage's own."""
    return chain.latency_s(node, item.start, item.end) - chain.latency_s(item.node, item.start, item.end)
