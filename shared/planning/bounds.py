"""What no plan can beat: the same problem with layers that may be split at will.

A node that holds work `x` of at most `w` pays ``fixed + slope x`` ≥ ``(slope + fixed / w) x``, so filling the
nodes with the least ``slope + fixed / w`` first is never dearer than the best plan.
"""

from __future__ import annotations

from shared.planning.bisection import least_feasible
from shared.planning.chain import LAST, MIDDLE, ONLY, RELATIVE_SLACK, Chain, NodeTerms


def least_latency_s(chain: Chain) -> float:
    """No route's time per token is below this."""
    offers = []
    for node, terms in enumerate(chain.nodes):
        work = _work_that_fits(chain, node)
        if work > 0:
            offers.append((terms.per_work_s + min(terms.fixed_s) / work, work))
    left, total = chain.work_before[-1], _least_extra_of_the_last(chain)
    for cost, work in sorted(offers):
        total += cost * min(left, work)
        left -= min(left, work)
    return total * (1 - RELATIVE_SLACK) if left <= RELATIVE_SLACK * chain.work_before[-1] else float("inf")


def least_bottleneck_s(chain: Chain, known_s: float) -> float:
    """No route's slowest stage is faster than this.

    Args:
        chain: The problem.
        known_s: The slowest stage of some route.
    """

    def is_enough(busy_max_s: float) -> bool:
        works = (
            _work_that_fits(chain, node, max(terms.work_max(role, busy_max_s) for role in range(4)))
            for node, terms in enumerate(chain.nodes)
        )
        return sum(works) >= chain.work_before[-1] * (1 - RELATIVE_SLACK)

    return least_feasible(is_enough, known_s) * (1 - RELATIVE_SLACK)


def _work_that_fits(chain: Chain, node: int, work_max: float = float("inf")) -> float:
    """The most work of any segment that the node has memory for and that is within a limit."""
    terms, start, most = chain.nodes[node], 0, 0.0
    limit = work_max * (1 + RELATIVE_SLACK)
    for end in range(1, len(chain.cuts)):
        while start < end and (terms.bytes_of(start, end) > terms.room_bytes[MIDDLE] or chain.work(start, end) > limit):
            start += 1
        most = max(most, chain.work(start, end))
    return most


def _least_extra_of_the_last(chain: Chain) -> float:
    def extra(terms: NodeTerms) -> float:
        return min(terms.fixed_s[LAST], terms.fixed_s[ONLY]) - min(terms.fixed_s)

    return min(map(extra, chain.nodes), default=0.0)
