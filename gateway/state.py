"""What the endpoints share: the served model, the mesh, and the limits of the HTTP side."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.fleet.drain import Drained
from gateway.generation_request import GenerationRequest
from gateway.model_files import ModelFiles
from gateway.openai_errors import model_not_found
from gateway.response_writer import StreamLimits
from gateway.token_feed import TokenStream
from gateway.tokenizer import ChatTokenizer
from shared.clock import Clock, SystemClock
from shared.mesh_tokens import MeshTokens
from shared.messages import Pooling

ANY_MODEL = "default"
"""The name under which any served model answers, for callers that do not care."""
BODY_BYTES_MAX = 8 * 2**20
"""Room for a million tokens of text; the JSON of a larger prompt is a mistake."""
SEED_BITS = 53
"""What a seed may be on the wire (`shared.messages.COUNT_MAX`)."""


class TokenSource(Protocol):
    """What generates: `gateway.generation.Generator`, or a script in tests."""

    def generation(self, request: GenerationRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Entering waits for admission; iterating yields tokens; leaving ends the work on every node."""
        ...

    async def embed(self, prompt_ids: tuple[int, ...], *, pooling: Pooling, request_id: str) -> tuple[float, ...]:
        """The model's last hidden states of a prompt, pooled: `hidden_size` numbers. Cancelling ends the work."""
        ...


class MeshView(Protocol):
    """What the endpoints may know of the mesh."""

    def missing_route(self) -> str | None:
        """Why no full route exists, in words; None when one does."""
        ...

    def readiness(self) -> dict[str, Any]:
        """The content of GET /readyz: `reason` (None when there is a route), `missing_layers`, `nodes`."""
        ...

    async def refresh(self) -> None:
        """Ask the nodes for their figures, within a second or so."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """The content of GET /mesh."""
        ...


class NodeDrainer(Protocol):
    """What takes nodes out of service: `gateway.fleet.drain.Drainer`."""

    async def drain(self, node: str) -> Drained:
        """Take one out of service; raises `DrainRefused`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model that this gateway serves.

    Args:
        names: Names under which callers ask for it; the first is its own.
        fingerprint: Names its weights.
        created: Unix seconds.
    """

    names: tuple[str, ...]
    fingerprint: str
    created: int

    @property
    def name(self) -> str:
        """Its own name, as every response gives it."""
        return self.names[0]

    def check(self, name: str) -> None:
        """Accept one of its names.

        Raises:
            ApiError: 404 for any other.
        """
        if name not in self.accepted:
            raise model_not_found(name, self.name)

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every name that it answers to, its own first."""
        return tuple(dict.fromkeys((*self.names, ANY_MODEL)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayState:
    """Everything that `gateway.app.create_app` needs.

    Args:
        model: What is served.
        tokenizer: Its tokenizer.
        generator: What generates.
        mesh: What is known of the nodes.
        model_files: The model's files, for nodes that have none; None where the gateway has no whole copy.
        api_keys: Keys that callers present; empty lets everybody call.
        mesh_tokens: What nodes present; opens what lies below ``/mesh`` too.
        drainer: Takes nodes out of service; None where there is nothing to take any out of.
        cors_origins: Web pages that may call; empty as `gateway.cors` says.
        body_bytes_max: The largest request body.
        stream_limits: How long a stream may be silent.
        clock: Times calls.
        unix_time: The wall clock, for `created`.
        random_seed: A fresh seed for calls that name none.
    """

    model: ServedModel
    tokenizer: ChatTokenizer
    generator: TokenSource
    mesh: MeshView
    model_files: ModelFiles | None = None
    api_keys: Sequence[str] = ()
    mesh_tokens: MeshTokens = field(default_factory=MeshTokens)
    drainer: NodeDrainer | None = None
    cors_origins: Sequence[str] = ()
    body_bytes_max: int = BODY_BYTES_MAX
    stream_limits: StreamLimits = field(default_factory=StreamLimits)
    clock: Clock = field(default_factory=SystemClock)
    unix_time: Callable[[], float] = time.time
    random_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS)
