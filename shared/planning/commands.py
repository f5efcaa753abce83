"""The commands that make a fleet what a plan says. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shared.options import QUANTIZE_NONE
from shared.planning.plan import Copy, Plan

MESH_TOKEN_VARIABLE = "MESHNET_MESH_TOKEN"  # noqa: S105 - the variable's name
_LOOPBACK = ("127.", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """How one machine is reached and told.

    Args:
        address: ``HOST:PORT`` under which the gateway reaches it.
        device: The node's `--device`; None leaves it to the node.
    """

    address: str
    device: str | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only the gateway's own machine reaches it."""
        return self.address.startswith(_LOOPBACK)

    @property
    def listen(self) -> str:
        """The node's `--listen`: its own loopback, or every interface at the same port."""
        return self.address if self.is_loopback else f"0.0.0.0:{self.address.rpartition(':')[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommands:
    """Writes the commands of one fleet.

    Args:
        model: As the user called it.
        dtype: The nodes' `--dtype`.
        quantize: Their `--quantize`.
        addresses: By machine's name.
        context_len: The gateway's `--context-len`.
        sessions: The nodes' `--kv-max-sessions`.
    """

    model: str
    dtype: str
    quantize: str
    addresses: Mapping[str, NodeAddress]
    context_len: int
    sessions: int

    def lines(self, plan: Plan) -> Iterator[str]:
        """A shell's lines for the whole plan, with comments that say where each is run."""
        copies = [copy for stage in plan.stages for copy in stage.copies]
        if not all(self.addresses[copy.machine.name].is_loopback for copy in copies):
            yield f"# everywhere; the same, and secret: openssl rand -hex 16\nexport {MESH_TOKEN_VARIABLE}=..."
        for copy in copies:
            yield f"# on {copy.machine.name}\n{shlex.join(self.node(copy))}"
        yield f"# on the gateway's machine\n{shlex.join(self.gateway(plan))}"

    def node(self, copy: Copy) -> list[str]:
        """How the node of a copy is started; its caches may take all that the plan leaves it."""
        place = self.addresses[copy.machine.name]
        return [
            *("meshnet", "shard", "--model", self.model, "--layers", str(copy.layers)),
            *("--listen", place.listen, "--node-id", copy.machine.name),
            *("--kv-max-sessions", str(self.sessions)),
            *("--kv-max-bytes", str(copy.cost.kv_bytes + copy.cost.free_bytes)),
            *(("--device", place.device) if place.device else ()),
            *(("--dtype", self.dtype) if self.dtype != "auto" else ()),
            *(("--quantize", self.quantize) if self.quantize != QUANTIZE_NONE else ()),
        ]

    def gateway(self, plan: Plan) -> list[str]:
        """How the gateway is started."""
        copies = [copy for stage in plan.stages for copy in stage.copies]
        nodes = [f"ws://{self.addresses[copy.machine.name].address}" for copy in copies]
        flags = [flag for url in nodes for flag in ("--node", url)]
        return [
            *("meshnet", "gateway", "--model", self.model, "--context-len", str(self.context_len)),
            *flags,
        ]
