"""What the executor asks of whatever computes: one step's share of a forward, and its outcome.

`shard.stage_runner` implements it with torch; tests implement it without, so that everything around the
model can be tried without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shard.drawing import Matcher
from shard.session import HeldCache
from shared.errors import MeshError
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step
from shared.tensor_spec import WireTensor


@dataclass(frozen=True, slots=True)
class Pass:
    """One step, ready to be computed.

    Args:
        step: Checked by `Runner.check`.
        tensors: The step's tensors, as received.
        cache: Holds exactly `step.past_len` positions; None is stateless.
        sampling: For the last hop, the step's own or what the session holds.
        cancelled: Asked between layers, from the compute thread.
        history: Ids of all positions up to the step's last, as 32-bit integers; for the last hop, where `sampling`
            needs them.
        matcher: The session's place in its grammar, for the last hop, where `sampling` has one.
    """

    step: Step
    tensors: Mapping[str, WireTensor]
    cache: HeldCache | None
    sampling: SamplingParams | None
    cancelled: Callable[[], bool]
    history: memoryview | None = None
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass gave: tensors for the next hop or of what was asked, and the last hop's token, or its text."""

    tensors: Mapping[str, WireTensor] = field(default_factory=dict)
    token_ids: tuple[int, ...] | None = None
    text: str | None = None


class Runner(Protocol):
    """A loaded stage and how steps are run on it. Everything but the attributes is for the compute thread alone."""

    @property
    def layers(self) -> LayerRange:
        """The range it holds."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model."""
        ...

    @property
    def device(self) -> str:
        """For example ``cpu`` or ``cuda:0``."""
        ...

    @property
    def dtype(self) -> str:
        """Element type of outputs, a key of `ITEM_BYTES`, and of weights unless they are quantized."""
        ...

    @property
    def quantize(self) -> str:
        """``none``, ``int8`` or ``int4``: how weights of linear layers are held."""
        ...

    @property
    def supports_kv_cache(self) -> bool:
        """False when the model's layers reject a cache; may turn false when that is noticed."""
        ...

    @property
    def returns_token_ids(self) -> bool:
        """Whether it is a last hop that gives token ids."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """What one position of one session takes."""
        ...

    @property
    def weight_bytes(self) -> int:
        """What its weights take."""
        ...

    @property
    def memory_limit_bytes(self) -> int:
        """Its device's memory, or what this process may have of it."""
        ...

    @property
    def context_len(self) -> int:
        """Positions the model was trained for; 0 when unknown."""
        ...

    @property
    def needs_token_ids(self) -> bool:
        """It is not first, and its steps must carry token ids all the same."""
        ...

    @property
    def refused_cuts(self) -> tuple[int, ...]:
        """Layers of the model before which no range may begin."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def sampling_fields(self) -> tuple[str, ...]:
        """The sampling parameters it honours, of `SAMPLING_FIELDS`."""
        ...

    @property
    def rewinds(self) -> bool:
        """Whether its caches can go back, if not always as far as they are asked to."""
        ...

    @property
    def features(self) -> tuple[str, ...]:
        """What it can do beyond plain steps, of `FEATURES`; `fork` and `rewind` are its node's affair."""
        ...

    def memory_free_bytes(self) -> int:
        """Memory of its device that is free now for sessions: what a step works in is left out."""
        ...

    def memory_used_bytes(self) -> int:
        """What this process has of its device's memory; may be asked from any thread, with every heartbeat."""
        ...

    def new_cache(self) -> HeldCache:
        """An empty cache for one session."""
        ...

    def new_matcher(self, params: SamplingParams) -> Matcher:
        """A place at the beginning of the grammar of these parameters, which is compiled when it is first needed.

        Raises:
            StepFailed: `bad_step`: it cannot follow grammars.
        """
        ...

    def check(self, step: Step, tensors: Mapping[str, WireTensor]) -> None:
        """Look at a step's tensors before anything is computed.

        Raises:
            StepFailed: `bad_step`, naming the tensor or field and its limit.
        """
        ...

    def run(self, passes: Sequence[Pass]) -> list[PassOutput | MeshError]:
        """Compute; one outcome for each pass, in order. A pass that fails leaves the others' outcomes alone.

        What is no pass's own failure is raised.
        """
        ...
