"""What a node grants each of its gateways of the sessions it can hold.

Gateways do not know of each other. Each says with its heartbeats how many sessions it has there and how many it would
begin; the answer says how many it may have. The node divides its places so that

- the sum of all grants is never more than it has;
- nobody is asked to give up a session that is running: a grant shrinks only as sessions end;
- who wants less than an equal share gets it all, and what that leaves is shared equally by the others;
- one place each is kept free for gateways that want none now, where there are enough, so that their next request need
  not wait for a heartbeat.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one gateway has and wants of a node.

    Args:
        held: Sessions that it has there.
        waiting: Sessions that it would begin.
        granted: What it was told last that it may have.
    """

    held: int = 0
    waiting: int = 0
    granted: int = 0

    @property
    def wanted(self) -> int:
        """All that it could use."""
        return self.held + self.waiting


class Shares:
    """What each gateway has been told it may hold. A grant is made smaller only in the answer to its own gateway.

    So the grants that gateways know of never sum up to more than there is: what one gives back, the other has one
    heartbeat later.
    """

    def __init__(self) -> None:
        self._claims: dict[Hashable, Claim] = {}

    def ask(self, gateway: Hashable, held: int, waiting: int, places: int) -> int:
        """How many of the places a gateway may have from now on that has, and would begin, so many sessions."""
        claim = Claim(held, waiting, self._claims.get(gateway, Claim()).granted)
        self._claims[gateway] = claim
        others = sum(other.granted for key, other in self._claims.items() if key != gateway)
        granted = max(0, min(divide_places(places, self._claims)[gateway], places - others))
        self._claims[gateway] = replace(claim, granted=granted)
        return granted

    def forget(self, gateway: Hashable) -> None:
        """Its link is gone, and its grant with it."""
        self._claims.pop(gateway, None)


def divide_places(places: int, claims: Mapping[Key, Claim]) -> dict[Key, int]:
    """Grants for each gateway; they sum up to `places` at most.

    Args:
        places: Sessions that the node can hold.
        claims: What each of its gateways has and wants.
    """
    if not claims:
        return {}
    spare = 1 if places >= 2 * len(claims) else 0
    grants = _equalized(places, {key: max(claim.wanted, spare) for key, claim in claims.items()})
    rest, odd = divmod(places - sum(grants.values()), len(claims))
    running = {key: min(claim.held, claim.granted) for key, claim in claims.items()}
    for rank, key in enumerate(grants):
        grants[key] = max(grants[key] + rest + (rank < odd), running[key])
    over = sum(grants.values()) - places
    for key in sorted(grants, key=lambda key: grants[key] - running[key], reverse=True):
        less = min(over, grants[key] - running[key])
        grants[key] -= less
        over -= less
    return grants


def _equalized(places: int, asked: Mapping[Key, int]) -> dict[Key, int]:
    """The largest equal share such that nobody gets more than was asked for; odd places go to who asked for most."""
    shares: dict[Key, int] = {}
    left = places
    by_modesty = sorted(asked, key=lambda key: asked[key])
    for rank, key in enumerate(by_modesty):
        shares[key] = min(asked[key], left // (len(by_modesty) - rank))
        left -= shares[key]
    return {key: shares[key] for key in asked}
