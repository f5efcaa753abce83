"""One session as a node holds it, and whether a step or a fork names exactly that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shard.drawing import Drawing
from shared.errors import CacheMissed, CacheMissReason, StepFailed
from shared.layers import LayerRange
from shared.messages import Fork, SamplingParams, Step


class HeldCache(Protocol):
    """What the store needs to know of a stage's cache."""

    @property
    def length(self) -> int:
        """Positions held."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated, which may be more than the positions fill."""
        ...

    def copy(self) -> HeldCache:
        """One of its own, with the same content. Takes a while; for the compute thread."""
        ...

    def can_rewind(self, length: int) -> bool:
        """Whether it could go back to its first `length` positions and continue from there. For the compute thread."""
        ...

    def rewind(self, length: int) -> None:
        """Go back to the first `length` positions, which `can_rewind` allows. For the compute thread."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    """One session: its cache and what a step must name to continue it.

    Args:
        session: Its id, unique across gateways.
        layers: The range its cache covers.
        model: Fingerprint of the model it belongs to.
        cache: Owned by the compute thread while the session is open.
        epoch: Highest epoch that has touched it.
        step_index: The step applied last.
        sampling: What a decode without `sampling` uses.
        drawing: The history that its draws need, if they need one. Like `cache`, it is the compute thread's while the
            session is open; it counts up to `length`.
        length: Positions held at the last commit.
        nbytes: Bytes counted at the last commit.
        used_at: Clock of the last open or commit.
        pinned: Whether a step has it open.
        dropped: Set when it was released while open.
    """

    session: str
    layers: LayerRange
    model: str
    cache: HeldCache
    epoch: int
    step_index: int
    sampling: SamplingParams | None
    drawing: Drawing | None = None
    length: int = 0
    nbytes: int = 0
    used_at: float = 0.0
    pinned: bool = False
    dropped: bool = False


def check_epoch(held: Session, step: Step | Fork) -> None:
    """Refuse what a replay has left behind.

    Raises:
        StepFailed: `stale_epoch`.
    """
    if step.epoch < held.epoch:
        raise StepFailed(
            "stale_epoch",
            f"epoch {step.epoch} is below {held.epoch}, which the session has seen",
            field="epoch",
            limit=held.epoch,
        )


def check_new(held: Session, step: Step) -> None:
    """Refuse a prefill, or a decode that goes back, that has been applied: no position tells.

    Raises:
        StepFailed: `duplicate_step`.
    """
    if step.epoch == held.epoch and step.step_index <= held.step_index:
        raise StepFailed(
            "duplicate_step",
            f"step_index {step.step_index} of epoch {step.epoch} is not after {held.step_index}, which was applied",
            field="step_index",
            limit=held.step_index,
        )


def check_rewind(step: Step, held: Session) -> None:
    """Refuse to go back where the cache no longer has what came before; the session stays as it is.

    Raises:
        CacheMissed: `not_rewindable`.
    """
    if step.rewind_from is not None and not held.cache.can_rewind(step.past_len):
        raise CacheMissed("not_rewindable", session=held.session, held_len=held.length)


def mismatch(held: Session, step: Step | Fork) -> CacheMissReason | None:
    """Why this is not what a decode or a fork names; None when it is."""
    if step.model != held.model:
        return "model_mismatch"
    if step.layers != held.layers:
        return "range_mismatch"
    return None if _held_len(step) == held.length else "past_len_mismatch"


def _held_len(step: Step | Fork) -> int:
    """How many positions it says that the session holds."""
    rewind_from = step.rewind_from if isinstance(step, Step) else None
    return step.past_len if rewind_from is None else rewind_from
