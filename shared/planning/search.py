"""Which nodes hold which segments: chooses the search that is exact where one is, and asks it for the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.planning.chain import RELATIVE_SLACK, Chain, Placement, bottleneck_of
from shared.planning.fleet import Objective
from shared.planning.ordered import OrderedSearch
from shared.planning.subsets import SUBSET_STEPS_MAX, SubsetSearch, subset_steps
from shared.planning.uniform import UniformSearch

NO_LIMIT = float("inf")


class Search(Protocol):
    """A way to find routes through a chain."""

    def least_limit(self, known_s: float) -> float:
        """The least slowest stage of any route, given that of some route."""

    def fastest(self, busy_max_s: float = NO_LIMIT, required: int | None = None) -> Placement | None:
        """The route of least time per token under a limit, with a node that must be on it; None when there is none."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best route that was found.

    Args:
        placement: Which node holds which segment.
        busy_limit_s: What its slowest stage was kept to; infinite for `latency`.
        is_optimal: Whether the search was exact.
    """

    placement: Placement
    busy_limit_s: float
    is_optimal: bool


def choose_search(chain: Chain) -> tuple[Search, bool]:
    """The search for a chain, and whether it is exact."""
    if chain.is_uniform:
        return UniformSearch(chain), True
    if subset_steps(chain) <= SUBSET_STEPS_MAX:
        return SubsetSearch(chain), True
    return OrderedSearch(chain), False


def find_placements(chain: Chain, objective: Objective) -> list[Found]:
    """Routes worth considering; the first is the best by the objective.

    For `latency` that is the route of least time per token; for `throughput` the one of the least slowest stage and
    then of the least time, followed by that of least time, which leaves more machines over for replicas.

    Returns:
        Nothing when no route fits the memory there is (or, where the search is not exact, none was found).
    """
    search, is_exact = choose_search(chain)
    fastest = search.fastest()
    if fastest is None:
        return []
    found = Found(fastest, NO_LIMIT, is_exact)
    if objective == "latency":
        return [found]
    limit = search.least_limit(bottleneck_of(chain, fastest)) * (1 + RELATIVE_SLACK)
    steady = search.fastest(limit) or fastest
    return [Found(steady, limit, is_exact), found]
