"""What a planner must know of a model: bytes and relative work of each layer, of both ends, and where it may be cut.

Pure types; `shared.models.measure` fills them from a folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.options import QUANTIZE_NONE


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What one layer keeps of one session.

    Args:
        bytes_per_token: Keys and values of one position; 0 for a layer that keeps none.
        tokens_max: Positions that a sliding window keeps; None where all are kept.
        state_bytes: What it keeps whatever the length: the state of a linear-attention layer.
    """

    bytes_per_token: int = 0
    tokens_max: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One decoder layer.

    Args:
        weight_bytes: Its weights in memory.
        active_bytes: Those that a decode step reads: all of them, or the chosen experts' share.
        slot: What it keeps of a session.
    """

    weight_bytes: int
    active_bytes: int
    slot: SlotFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as a planner sees it; all sizes are those in memory, in the element type it will be computed in.

    Args:
        layers: Every decoder layer, in order.
        embedding_bytes: The input embedding, which the first range holds.
        head_bytes: The output head, which the last range holds.
        is_tied: Head and embedding are one tensor, held once by a range that is first and last.
        tied_bytes: What both take in a range that is first and last, if they are tied: never quantized. 0 stands for
            `embedding_bytes`.
        shared_bytes: What every range holds: the final norm, learned positions.
        hidden_bytes: One position's hidden states on the wire.
        forbidden_cuts: Boundaries at which no range may end: layer `n` and `n - 1` must share a node.
        context_len: Positions it was trained for; 0 when it does not say.
        vocab_size: Entries of the head.
        step_bytes_per_token: Activations that the widest layer holds at once for one new position.
        mask_bytes_per_pair: What the attention's mask takes for one new position and one that it may see.
        dtype: Element type that it is computed in; empty where nobody has said.
        quantize: How a node holds its weights.

    Raises:
        ValueError: If there is no layer, or a forbidden cut is none of the boundaries between layers.
    """

    layers: tuple[LayerFacts, ...]
    embedding_bytes: int
    head_bytes: int
    is_tied: bool
    shared_bytes: int
    hidden_bytes: int
    forbidden_cuts: frozenset[int] = frozenset()
    context_len: int = 0
    vocab_size: int = 0
    tied_bytes: int = 0
    step_bytes_per_token: int = 0
    mask_bytes_per_pair: int = 0
    dtype: str = ""
    quantize: str = QUANTIZE_NONE

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        if not all(0 < cut < len(self.layers) for cut in self.forbidden_cuts):
            raise ValueError(f"forbidden cuts must lie between layers, got {sorted(self.forbidden_cuts)}")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def precision(self) -> str:
        """How it is held, for people: ``bfloat16``, or ``bfloat16, weights in int8``."""
        return self.dtype if self.quantize == QUANTIZE_NONE else f"{self.dtype}, weights in {self.quantize}"

    @property
    def mean_active_bytes(self) -> float:
        """What a decode step reads of a layer, on average; the unit of work."""
        return sum(layer.active_bytes for layer in self.layers) / len(self.layers)

    def end_bytes(self, *, is_first: bool, is_last: bool) -> int:
        """Weights that a range holds because it is the first, the last, or both."""
        if is_first and is_last and self.is_tied:
            return self.tied_bytes or self.embedding_bytes
        return (self.embedding_bytes if is_first else 0) + (self.head_bytes if is_last else 0)
