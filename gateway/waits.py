"""The steps that wait for a node's answers, matched by (session, step_index, epoch)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import CacheMissed, MeshError, StepFailed
from shared.messages import CacheMiss, Error, Step, StepResult
from shared.tensor_spec import WireTensor

Answer = tuple[StepResult, dict[str, WireTensor]]
_Key = tuple[str, int, int]


@dataclass(slots=True, eq=False)
class Wait:
    """A step that has been asked and not been answered.

    Args:
        step: The step.
        answer: What it is waited for with.
        asked_at: Clock.
        asked_at_attentive: See `gateway.liveness`.
        allowance_s: How long the node may take for it.
        sent_mark: Proof that its frame has arrived, once it is answered.
        is_alone: No other step was asked of the node at any time while this one waited.
    """

    step: Step
    answer: asyncio.Future[Answer]
    asked_at: float
    asked_at_attentive: float
    allowance_s: float
    sent_mark: int
    is_alone: bool = True

    @property
    def key(self) -> _Key:
        """What its answer will name."""
        return self.step.session, self.step.step_index, self.step.epoch

    def fail(self, error: Exception) -> None:
        """End the wait, unless it has ended."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Waits:
    """All waits of one node. An answer that nobody waits for is late: it is dropped and counted."""

    def __init__(self) -> None:
        self.late_answers = 0
        self._waits: dict[_Key, Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[Wait]:
        return iter(self._waits.values())

    def add(self, wait: Wait) -> None:
        """Begin a wait; whoever waits ends it with `remove`.

        Raises:
            ValueError: The same step is waited for already, and their answers could not be told apart.
        """
        if wait.key in self._waits:
            raise ValueError(f"step {wait.key} is already waited for")
        if self._waits:
            wait.is_alone = False
            if len(self._waits) == 1:
                next(iter(self)).is_alone = False
        self._waits[wait.key] = wait

    def remove(self, wait: Wait) -> None:
        """Nobody waits any more."""
        del self._waits[wait.key]

    def take_result(self, result: StepResult, tensors: dict[str, WireTensor]) -> Wait | None:
        """Hand a result to who waits for it; returns the wait, or None when it is late."""
        wait = self._find(result.session, result.step_index, result.epoch)
        if wait is not None:
            wait.answer.set_result((result, tensors))
        return wait

    def take_miss(self, miss: CacheMiss) -> Wait | None:
        """As `take_result`, raising `CacheMissed` at who waits."""
        wait = self._find(miss.session, miss.step_index, miss.epoch)
        if wait is not None:
            wait.fail(CacheMissed(miss.reason, held_len=miss.held_len))
        return wait

    def take_error(self, error: Error) -> None:
        """Raise `StepFailed` at who waits for this step, or for any of this session when it names no step."""
        waits = [wait for wait in self if _concerns(error, wait.step) and not wait.answer.done()]
        self.late_answers += not waits
        for wait in waits:
            wait.fail(StepFailed(error.code, error.message or error.code))

    def fail_all(self, error: MeshError) -> None:
        """End every wait."""
        for wait in self:
            wait.fail(error)

    def _find(self, session: str, step_index: int, epoch: int) -> Wait | None:
        wait = self._waits.get((session, step_index, epoch))
        if wait is None or wait.answer.done():
            self.late_answers += 1
            return None
        return wait


def _concerns(error: Error, step: Step) -> bool:
    if step.session != error.session:
        return False
    return error.step_index is None or (step.step_index, step.epoch) == (error.step_index, error.epoch)
