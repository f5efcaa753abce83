"""What generations did, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Figures:
    """What a generation did, for logs.

    Args:
        passes: Times that positions went over the whole route.
        steps: Steps sent to nodes.
        misses: Cache misses answered, by reason.
        failures: Other failures of steps, by code.
        replays: Hops rebuilt.
        full_replays: Of these, from an earlier hop, because the journal had been dropped.
        moves: Hops taken over by another node.
        reroutes: Times it was led over nodes that are cut elsewhere.
        recovering_s: Seconds between failures and the answers that ended them.
        queued_s: Seconds before admission.
    """

    passes: int = 0
    steps: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    full_replays: int = 0
    moves: int = 0
    reroutes: int = 0
    recovering_s: float = 0.0
    queued_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """What a gateway did since its start.

    Args:
        outcomes: Generations `started`, of these `completed`, `cancelled` (left early) and `failed`; and `refused`.
        passes: And the following: as in `Figures`, of generations that have ended.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    passes: int = 0
    misses: int = 0
    replays: int = 0
    full_replays: int = 0
    moves: int = 0
    reroutes: int = 0

    def add(self, figures: Figures) -> None:
        """Take in a generation that has ended."""
        self.passes += figures.passes
        self.misses += figures.misses.total()
        self.replays += figures.replays
        self.full_replays += figures.full_replays
        self.moves += figures.moves
        self.reroutes += figures.reroutes


def merge_figures(parts: Iterable[Figures]) -> Figures:
    """What several generations did together; they waited for one admission, so that is not added up."""
    merged = Figures()
    for part in parts:
        merged.passes += part.passes
        merged.steps += part.steps
        merged.misses.update(part.misses)
        merged.failures.update(part.failures)
        merged.replays += part.replays
        merged.full_replays += part.full_replays
        merged.moves += part.moves
        merged.reroutes += part.reroutes
        merged.recovering_s += part.recovering_s
        merged.queued_s = max(merged.queued_s, part.queued_s)
    return merged
