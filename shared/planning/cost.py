"""What a range costs a machine: memory, time per token, time of a prompt. docs/planning.md derives it.

Hops are relayed by the gateway, so a hop's time depends on its own machine, link and range, and not on its neighbours:

    hop = overhead + round trip + (bytes in + bytes out) / bandwidth + layers' work x decode time [+ head]

A stage is occupied by a token for the longer of its compute and its transfers; round trips occupy nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, TypeVar

from shared.layers import LayerRange
from shared.models.facts import LayerFacts, ModelFacts
from shared.models.range_memory import StepSizes, slot_bytes, weights_bytes, working_bytes
from shared.planning.chain import FIRST, LAST, Chain, NodeTerms, role_of
from shared.planning.fleet import Demand, Machine

FRAME_BYTES: Final = 224
"""A frame beyond its tensor: 448 bytes were measured both ways (benchmarks/results/hop.json)."""
TOKEN_BYTES: Final = 4
"""A token id on the wire."""
GATEWAY_TOKEN_S: Final = 0.0005
"""What the gateway spends on a token besides its hops: 0.3 to 0.8 ms (README)."""


_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a range costs on a machine, for one token unless it says otherwise.

    Args:
        weights_bytes: Layers, ends and what every range holds.
        kv_bytes: Caches of all sessions at their full length.
        working_bytes: What its largest step takes while it runs.
        free_bytes: What the machine has beyond these and its runtime.
        compute_s: Its layers, and the head on the last hop.
        transfer_s: Bytes over the link, both ways.
        latency_s: All that a token waits for on this hop.
        busy_s: How long the stage is occupied.
        prefill_s: The prompt of the demand; None where the machine's prefill time is not known.
    """

    weights_bytes: int
    kv_bytes: int
    working_bytes: int
    free_bytes: int
    compute_s: float
    transfer_s: float
    latency_s: float
    busy_s: float
    prefill_s: float | None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of one model under one demand.

    Args:
        model: As machines hold it that do not say otherwise.
        demand: What is to be served.
        variants: The same model as other machines hold it, by their `precision`.
    """

    model: ModelFacts
    demand: Demand
    variants: Mapping[str, ModelFacts] = field(default_factory=dict)

    def on(self, machine: Machine) -> CostModel:
        """Costs of the model as this machine holds it."""
        return CostModel(self.variants.get(machine.precision, self.model), self.demand)

    def stage(self, machine: Machine, layers: LayerRange) -> StageCost:
        """What a range costs on a machine."""
        if self.variants:
            return self.on(machine).stage(machine, layers)
        role = self._role(layers)
        weights, kv = self.weights_bytes(layers), self.kv_bytes(layers)
        working = self.working_bytes(role)
        work = sum(self.layer_work(layer) for layer in self.model.layers[layers.start : layers.end])
        terms = self.terms(machine)
        return StageCost(
            weights_bytes=weights,
            kv_bytes=kv,
            working_bytes=working,
            free_bytes=machine.memory_bytes - machine.runtime_bytes - weights - kv - working,
            compute_s=terms.busy_fixed_s[role] + terms.per_work_s * work,
            transfer_s=sum(self._wire_bytes(role, 1)) / machine.bytes_per_s,
            latency_s=terms.latency_s(role, work),
            busy_s=terms.busy_s(role, work),
            prefill_s=self._prefill_s(machine, role, work),
        )

    def weights_bytes(self, layers: LayerRange) -> int:
        """Weights that a node with this range holds."""
        return weights_bytes(self.model, layers)

    def kv_bytes(self, layers: LayerRange) -> int:
        """Caches that a node with this range holds, all sessions at their full length."""
        return sum(self._session_bytes(layer) for layer in self.model.layers[layers.start : layers.end])

    def working_bytes(self, role: int) -> int:
        """What the largest step takes on a node of this role: a chunk of a prompt, or a step of every session."""
        sizes = StepSizes(
            chunk_tokens=max(self.demand.chunk_tokens, self.demand.sessions), context_len=self.demand.context_len
        )
        return working_bytes(self.model, sizes, has_head=bool(role & LAST))

    def layer_work(self, layer: LayerFacts) -> float:
        """A layer's share of a decode step; the average layer's is 1. Decoding reads weights, so bytes decide."""
        mean = self.model.mean_active_bytes
        return layer.active_bytes / mean if mean else 1.0

    def head_s(self, machine: Machine) -> float:
        """Final norm, head and draw of one token on a machine."""
        if machine.head_s is not None:
            return machine.head_s
        mean = self.model.mean_active_bytes
        return machine.decode_s_per_layer * self.model.head_bytes / mean if mean else 0.0

    def terms(self, machine: Machine) -> NodeTerms:
        """A machine's costs as the searches take them."""
        if self.variants:
            return self.on(machine).terms(machine)
        roles = range(4)
        head = [self.head_s(machine) if role & LAST else 0.0 for role in roles]
        wire = [[part / machine.bytes_per_s for part in self._wire_bytes(role, 1)] for role in roles]
        hop = machine.hop_overhead_s + machine.rtt_s
        own = machine.memory_bytes - machine.runtime_bytes - self.model.shared_bytes
        return NodeTerms(
            room_bytes=_by_role([own - self._end_bytes(role) - self.working_bytes(role) for role in roles]),
            fixed_s=_by_role([hop + sum(wire[role]) + head[role] for role in roles]),
            per_work_s=machine.decode_s_per_layer,
            busy_fixed_s=_by_role(head),
            wire_s=_by_role([max(wire[role]) for role in roles]),
            bytes_before=self._bytes_before(),
            precision=machine.precision,
        )

    def chain(self, machines: Sequence[Machine]) -> Chain:
        """The planning problem of these machines."""
        cuts = self._cuts()
        work_before = list(accumulate((self.layer_work(layer) for layer in self.model.layers), initial=0.0))
        return Chain(
            cuts=cuts,
            work_before=tuple(work_before[cut] for cut in cuts),
            nodes=tuple(self.terms(machine) for machine in machines),
        )

    def _cuts(self) -> tuple[int, ...]:
        return tuple(cut for cut in range(self.model.num_layers + 1) if cut not in self.model.forbidden_cuts)

    def _bytes_before(self) -> tuple[int, ...]:
        sizes = (layer.weight_bytes + self._session_bytes(layer) for layer in self.model.layers)
        bytes_before = list(accumulate(sizes, initial=0))
        return tuple(bytes_before[cut] for cut in self._cuts())

    def _role(self, layers: LayerRange) -> int:
        return role_of(is_first=layers.start == 0, is_last=layers.end == self.model.num_layers)

    def _end_bytes(self, role: int) -> int:
        return self.model.end_bytes(is_first=bool(role & FIRST), is_last=bool(role & LAST))

    def _session_bytes(self, layer: LayerFacts) -> int:
        """One layer's caches of all sessions, as a node allocates them."""
        return self.demand.sessions * slot_bytes(layer.slot, self.demand.context_len)

    def _wire_bytes(self, role: int, positions: int) -> tuple[int, int]:
        """What a step brings to a hop, and what its answer takes back."""
        ids, hidden = TOKEN_BYTES * positions, self.model.hidden_bytes * positions
        brought = ids if role & FIRST else hidden
        taken = TOKEN_BYTES if role & LAST else hidden
        return FRAME_BYTES + brought, FRAME_BYTES + taken

    def _prefill_s(self, machine: Machine, role: int, work: float) -> float | None:
        """The hop's share of the time to the first token: chunk after chunk, each no faster than a decode step."""
        per_token_s = machine.prefill_s_per_layer_token
        if per_token_s is None:
            return None
        total = self.head_s(machine) if role & LAST else 0.0
        for start in range(0, self.demand.prompt_len, self.demand.chunk_tokens):
            positions = min(self.demand.chunk_tokens, self.demand.prompt_len - start)
            compute = work * max(machine.decode_s_per_layer, per_token_s * positions)
            transfer = sum(self._wire_bytes(role, positions)) / machine.bytes_per_s
            total += machine.hop_overhead_s + machine.rtt_s + transfer + compute
        return total


def _by_role(values: Sequence[_Number]) -> tuple[_Number, _Number, _Number, _Number]:
    middle, first, last, only = values
    return middle, first, last, only
