"""What the fleet's decisions are made from, and what they can be. Pure data; time is the caller's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.layers import LayerRange
from shared.messages import MachineInfo, NodeState
from shared.planning.fleet import Objective

IMPOSSIBLE = "no plan is possible"
"""What a decision's `pending` says where no node could be given what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that takes any range.

    Args:
        node: Its id.
        machine: What it offers.
        rtt_s: Round trip to it.
        bytes_per_s: What its link carries; None where that is not known.
        layer_s: What an average layer takes of a decode step, as its steps have shown; None before they have.
        joined_at: When its link was opened last.
        away_s: How long it has been gone; 0 while it is here.
        layers: The range it says it holds, whatever its state; None for none.
        state: Of that range; None without one, or while it loads another.
        loading: What it was told to load and has not answered yet.
        is_leaving: It is to go, or says that it goes.
        failed: Ranges that it could not load, for as long as that is not tried again.
    """

    node: str
    machine: MachineInfo
    rtt_s: float = 0.0
    bytes_per_s: float | None = None
    layer_s: float | None = None
    joined_at: float = 0.0
    away_s: float = 0.0
    layers: LayerRange | None = None
    state: NodeState | None = None
    loading: LayerRange | None = None
    is_leaving: bool = False
    failed: frozenset[LayerRange] = frozenset()

    @property
    def is_here(self) -> bool:
        """Whether it can be told something."""
        return self.away_s == 0

    @property
    def serves(self) -> LayerRange | None:
        """The range that it serves now."""
        return self.layers if self.is_here and self.state == "ready" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedNode:
    """A node whose range is given.

    Args:
        node: Its id.
        layers: Its range.
        is_leaving: As of a member.
        away_s: As of a member.
        is_ready: Whether it serves now.
        token_s: What a decode step takes there and back, as measured; None before the first.
        precision: As in `NodeInfo`.
    """

    node: str
    layers: LayerRange
    is_leaving: bool = False
    away_s: float = 0.0
    is_ready: bool = True
    token_s: float | None = None
    precision: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The plan in force.

    Args:
        ranges: What each member is to hold.
        reason: Why it was adopted.
        adopted_at: When.
    """

    ranges: Mapping[str, LayerRange]
    reason: str
    adopted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """Everything a decision depends on.

    Args:
        now_s: Clock.
        num_layers: Of the model.
        members: Nodes that take any range, those that are away for a while included.
        fixed: Nodes whose range is given, those that are away for a while included.
        refused_cuts: Boundaries at which nodes have said that the model cannot be cut.
        target: The plan in force.
        is_idle: No answer is in the making, and none waits.
        improved_at: When a plan was last adopted for speed.
    """

    now_s: float
    num_layers: int
    members: tuple[Member, ...] = ()
    fixed: tuple[FixedNode, ...] = ()
    refused_cuts: frozenset[int] = frozenset()
    target: Target | None = None
    is_idle: bool = True
    improved_at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Adopt:
    """Let this be the plan in force; `for_speed` if the fleet could have done without."""

    target: Target
    for_speed: bool = False


@dataclass(frozen=True, slots=True)
class LoadRange:
    """Tell a member to hold a range."""

    node: str
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class UnloadRange:
    """Tell a member to hold nothing."""

    node: str


Change = Adopt | LoadRange | UnloadRange


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now.

    Args:
        change: At most one thing.
        pending: What is waited for, in words; empty when nothing is.
    """

    change: Change | None = None
    pending: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """When a plan may change.

    Args:
        objective: What plans minimize.
        settle_s: After a node has joined, others that were started with it are waited for so long.
        grace_s: How long a lost node keeps its part of the plan.
        spare_grace_s: How long a lost node is waited for before nodes that can be spared take its layers: answers
            wait for them, and to load takes time too.
        gain_min: What a plan must promise to be adopted for speed alone, as a multiple of the rate of the one in force.
        improve_every_s: How often that may be.
    """

    objective: Objective = "latency"
    settle_s: float = 2.0
    grace_s: float = 30.0
    spare_grace_s: float = 5.0
    gain_min: float = 1.15
    improve_every_s: float = 60.0


DEFAULT_POLICY = FleetPolicy()
