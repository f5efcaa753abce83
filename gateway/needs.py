"""What a request asks of the nodes that serve it, beyond holding their layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.messages import NodeInfo, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What nodes must be able to do, compared with what each says of itself.

    Replicas of different abilities exist while a mesh is upgraded, so routes and failover both ask.

    Args:
        sampling: Names of the `SamplingParams` fields that the last hop must honour.
        features: Of `shared.messages.FEATURES`, what the last hop must do beyond drawing tokens.
        context_len: Positions that every hop must take.
    """

    sampling: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    context_len: int = 0

    def unmet(self, node: NodeInfo) -> list[str]:
        """What is asked of a last hop and this one cannot; nothing is asked of others."""
        if not node.is_last:
            return []
        return sorted(self.sampling.difference(node.sampling) | self.features.difference(node.features))

    def fits(self, node: NodeInfo) -> bool:
        """Whether the node takes so many positions; one that does not say how many takes any."""
        return not node.context_len or self.context_len <= node.context_len

    def are_met_by(self, node: NodeInfo) -> bool:
        """Whether the node can serve."""
        return self.fits(node) and not self.unmet(node)


def needs_of(choices: Iterable[SamplingParams], *, context_len: int, features: Iterable[str] = ()) -> Needs:
    """What these choices need of the nodes.

    Args:
        choices: How tokens are drawn; none where none are.
        context_len: Positions of prompt and answer together.
        features: Of `shared.messages.FEATURES`.
    """
    fields = frozenset[str]().union(*(choice.asked_fields() for choice in choices))
    return Needs(sampling=fields, features=frozenset(features), context_len=context_len)
