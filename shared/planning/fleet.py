"""What a planner is given of a fleet and of the demand on it. Pure data, whatever it was read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from shared.models.range_memory import CHUNK_TOKENS, RUNTIME_BYTES

Objective = Literal["latency", "throughput"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)

HOP_OVERHEAD_S: Final = 0.0015
"""What a hop adds to its compute where sending takes no time: 1.3 to 1.6 ms, mostly a core that has to wake
(benchmarks/results/hop.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine that may hold a range.

    Args:
        name: Unique in the fleet; the node's id.
        memory_bytes: All that the node's process may use.
        decode_s_per_layer: A decode step of one position through an average layer of this model.
        prefill_s_per_layer_token: One position of a long prefill step through an average layer; None if unknown.
        head_s: Final norm, head and draw of one token; None derives it from the head's size.
        rtt_s: Round trip between gateway and machine.
        bytes_per_s: What the link carries, either way.
        hop_overhead_s: What a hop adds besides compute, round trip and transfer.
        runtime_bytes: What the process needs besides weights and caches.
        precision: How it holds the weights, where that is not as everybody does: a key of `CostModel.variants`.

    Raises:
        ValueError: If a figure is not positive where it must be.
    """

    name: str
    memory_bytes: int
    decode_s_per_layer: float
    prefill_s_per_layer_token: float | None = None
    head_s: float | None = None
    rtt_s: float = 0.0
    bytes_per_s: float = float("inf")
    hop_overhead_s: float = HOP_OVERHEAD_S
    runtime_bytes: int = RUNTIME_BYTES
    precision: str = ""

    def __post_init__(self) -> None:
        if not (self.memory_bytes > 0 and self.decode_s_per_layer > 0 and self.bytes_per_s > 0):
            raise ValueError(f"{self.name}: memory, decode time and bandwidth must be above 0")
        if min(self.rtt_s, self.hop_overhead_s, self.runtime_bytes, self.head_s or 0) < 0:
            raise ValueError(f"{self.name}: no duration and no size may be below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the fleet is to serve.

    Args:
        sessions: Answers in the making at once, each with a cache on every hop.
        context_len: Positions that each may reach.
        prompt_len: Length of the prompt whose time to first token is predicted.
        chunk_tokens: Positions of a prompt that a hop is given at once (the gateway's `--prefill-chunk-tokens`).

    Raises:
        ValueError: If one is below 1.
    """

    sessions: int = 1
    context_len: int = 4096
    prompt_len: int = 512
    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        if min(self.sessions, self.context_len, self.prompt_len, self.chunk_tokens) < 1:
            raise ValueError("sessions, context_len, prompt_len and chunk_tokens must be at least 1")
