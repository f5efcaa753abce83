"""A fleet of values: members that load, go and come back on a clock of numbers, steered by `gateway.fleet.decide`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gateway.fleet.cover import covers
from gateway.fleet.decide import decide
from gateway.fleet.forecast import Forecast
from gateway.fleet.state import (
    Adopt,
    Change,
    Decision,
    FixedNode,
    FleetPolicy,
    FleetState,
    LoadRange,
    Member,
    Target,
    UnloadRange,
)
from shared.layers import LayerRange
from shared.messages import MachineInfo
from shared.models.facts import LayerFacts, ModelFacts, SlotFacts
from shared.planning.fleet import Demand, Objective

NUM_LAYERS = 12
LAYER_BYTES = 1_000
LOAD_S = 5.0
STEP_S = 1.0


def facts(num_layers: int = NUM_LAYERS, layer_bytes: int = LAYER_BYTES) -> ModelFacts:
    """A model of equal layers and small ends."""
    return ModelFacts(
        layers=(LayerFacts(layer_bytes, layer_bytes, SlotFacts(bytes_per_token=0)),) * num_layers,
        embedding_bytes=100,
        head_bytes=100,
        is_tied=False,
        shared_bytes=0,
        hidden_bytes=8,
    )


def forecast(objective: Objective = "latency") -> Forecast:
    """Plans for that model, which in int8 takes half."""
    return Forecast(
        facts=facts(),
        demand=Demand(sessions=1, context_len=16),
        objective=objective,
        variants={"f32": facts(), "f32/int8": facts(layer_bytes=LAYER_BYTES // 2)},
        stored="f32",
    )


def machine(layers: int = 6, layer_ms: float = 10.0, **fields: object) -> MachineInfo:
    """One with room for so many layers, each of which takes so long."""
    memory_bytes = layers * LAYER_BYTES + 250
    return MachineInfo(memory_bytes=memory_bytes, read_bytes_per_s=round(LAYER_BYTES / layer_ms * 1000), **fields)  # type: ignore[arg-type]


@dataclass
class World:
    """Members by id, and what was decided.

    Args:
        plans: Makes plans.
        policy: When they may change.
        is_idle: Whether no answer is in the making.
    """

    plans: Forecast = field(default_factory=forecast)
    policy: FleetPolicy = field(default_factory=FleetPolicy)
    is_idle: bool = True
    now_s: float = 1000.0
    members: dict[str, Member] = field(default_factory=dict)
    fixed: tuple[FixedNode, ...] = ()
    refused_cuts: frozenset[int] = frozenset()
    target: Target | None = None
    improved_at: float = float("-inf")
    changes: list[Change] = field(default_factory=list)
    pending: str = ""
    _loaded_at: dict[str, float] = field(default_factory=dict)

    def join(self, node: str, offered: MachineInfo | None = None, **fields: object) -> None:
        """A fresh process of this id is here."""
        offered = offered or (self.members[node].machine if node in self.members else machine())
        self.members[node] = Member(node=node, machine=offered, joined_at=self.now_s, **fields)  # type: ignore[arg-type]
        self._loaded_at.pop(node, None)

    def lose(self, node: str) -> None:
        """It is gone."""
        self.members[node] = replace(self.members[node], away_s=1e-6, loading=None)
        self._loaded_at.pop(node, None)

    def leave(self, node: str) -> None:
        """It is to go."""
        self.members[node] = replace(self.members[node], is_leaving=True)

    @property
    def state(self) -> FleetState:
        """As decisions see it."""
        return FleetState(
            now_s=self.now_s,
            num_layers=NUM_LAYERS,
            members=tuple(self.members[node] for node in sorted(self.members)),
            fixed=self.fixed,
            refused_cuts=self.refused_cuts,
            target=self.target,
            is_idle=self.is_idle,
            improved_at=self.improved_at,
        )

    def is_covered(self, *, hoped: bool = False) -> bool:
        """Whether all layers are served; with `hoped` also by those that are away for a moment."""
        served = [member.serves for member in self.members.values()]
        if hoped:
            served += [
                member.layers
                for member in self.members.values()
                if member.state == "ready" and member.away_s < self.policy.grace_s
            ]
        return covers([*filter(None, served), *(node.layers for node in self.fixed if node.is_ready)], NUM_LAYERS)

    def decide(self) -> Decision:
        """What is decided now, and done."""
        decision = decide(self.state, self.plans, self.policy)
        self.pending = decision.pending
        match decision.change:
            case Adopt(target, for_speed):
                self.target = target
                self.improved_at = self.now_s if for_speed else self.improved_at
            case LoadRange(node, layers):
                member = self.members[node]
                assert member.is_here
                assert member.loading != layers, "told twice"
                self.members[node] = replace(member, layers=None, state=None, loading=layers)
                self._loaded_at[node] = self.now_s + LOAD_S
            case UnloadRange(node):
                self.members[node] = replace(self.members[node], layers=None, state=None, loading=None)
        if decision.change is not None:
            self.changes.append(decision.change)
        return decision

    def settle(self) -> None:
        """Do everything that is decided now."""
        for _ in range(200):
            if self.decide().change is None:
                return
        raise AssertionError(f"it never comes to rest: {self.changes[-6:]}")

    def run(self, seconds: float) -> None:
        """Let time pass."""
        ends_at = self.now_s + seconds
        while self.now_s < ends_at:
            self.pass_time()
            self.settle()

    def pass_time(self) -> None:
        """One step, in which loads may end."""
        self.now_s += STEP_S
        for node, member in self.members.items():
            if member.away_s:
                self.members[node] = replace(member, away_s=member.away_s + STEP_S)
        for node in [node for node, at in self._loaded_at.items() if at <= self.now_s]:
            del self._loaded_at[node]
            member = self.members[node]
            if member.loading in member.failed:
                self.members[node] = replace(member, loading=None)
            else:
                self.members[node] = replace(member, layers=member.loading, state="ready", loading=None)

    def held(self) -> dict[str, str]:
        """What each serves."""
        return {node: str(member.serves) for node, member in sorted(self.members.items()) if member.serves}

    def adopted(self) -> list[str]:
        """Why plans were adopted."""
        return [change.target.reason for change in self.changes if isinstance(change, Adopt)]


def layers(text: str) -> LayerRange:
    """A range."""
    return LayerRange.parse(text)
