"""Runs steps on the compute thread: a list of steps in, one answer for each out.

Per step: check it, open its session, compute, commit or abort. A step that fails is answered with its
error and touches no other session.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from shard.drawing import Drawing, begin_drawing, continue_drawing
from shard.forking import fork_session
from shard.kv_cache import SessionStore
from shard.runner import Pass, PassOutput, Runner
from shard.session import Session, check_rewind
from shard.step_check import bad_step, check_lengths, check_sampling
from shard.step_queue import QueuedFork, QueuedStep
from shared.clock import Clock
from shared.errors import CacheMissed, MeshError, StepFailed
from shared.messages import CacheMiss, Error, Message, Step, StepResult
from shared.tensor_spec import WireTensor

POSITIONS_MAX = 1 << 20
"""Positions of one session when the model's own context length is unknown."""

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one step, and the tensors that go with it."""

    item: QueuedStep
    message: Message
    tensors: Mapping[str, WireTensor] = field(default_factory=dict)


@dataclass(slots=True)
class StepFigures:
    """Counters that rise from the start of the node; keys as in `NodeStats`."""

    steps: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    busy_us: int = 0

    def added(self, other: StepFigures) -> StepFigures:
        """Both together."""
        return StepFigures(
            self.steps + other.steps,
            self.misses + other.misses,
            self.errors + other.errors,
            self.busy_us + other.busy_us,
        )


class Executor:
    """Steps of one node. `run` belongs to the compute thread; `figures` may be read from any.

    Args:
        runner: The loaded stage.
        store: The sessions, or None when caching is off.
        model: Fingerprint that steps must name.
        clock: For `compute_us` and `queue_us`.
    """

    def __init__(self, *, runner: Runner, store: SessionStore | None, model: str, clock: Clock) -> None:
        self._runner = runner
        self._store = store
        self._model = model
        self._clock = clock
        self._figures = StepFigures()
        self._figures_lock = threading.Lock()
        self.refuses_new_sessions = False

    @property
    def keeps_sessions(self) -> bool:
        """False when caching is off or the model's layers reject a cache."""
        return self._store is not None and self._runner.supports_kv_cache

    def figures(self) -> StepFigures:
        """A snapshot of the counters."""
        with self._figures_lock:
            held = self._figures
            return StepFigures(held.steps.copy(), held.misses.copy(), held.errors.copy(), held.busy_us)

    def run(self, items: Sequence[QueuedStep]) -> list[Outcome]:
        """Answer each step, in order. At most one step of each session; never raises for what a step holds."""
        started_at = self._clock.monotonic()
        opened = [self._open(item) for item in items]
        passes = [each for each in opened if isinstance(each, _OpenStep)]
        results = self._compute(passes)
        busy_us = _microseconds(self._clock.monotonic() - started_at)
        outputs = iter(results)
        outcomes = []
        for item, each in zip(items, opened, strict=True):
            result = self._close(each, next(outputs)) if isinstance(each, _OpenStep) else each
            outcomes.append(self._answer(item, result, started_at, busy_us))
        with self._figures_lock:
            self._figures.busy_us += busy_us
        return outcomes

    def fork(self, item: QueuedFork) -> None:
        """Copy a session, or do nothing but count why not: a fork is not answered. Never raises for what it holds."""
        outcome: MeshError | None = None
        try:
            self._fork(item)
        except MeshError as error:
            outcome = error
        except Exception as error:
            log.exception("fork.failed", session=item.fork.session)
            outcome = failure_of(error)
        self._count("fork", outcome)
        if outcome is not None:
            log.debug("fork.refused", session=item.fork.session, target=item.fork.target, code=outcome.code)

    def _fork(self, item: QueuedFork) -> None:
        if self._store is None or not self.keeps_sessions:
            raise CacheMissed("disabled", session=item.fork.session)
        if self.refuses_new_sessions:
            raise StepFailed("draining", "the node is leaving and takes no new session")
        if item.fork.sampling is not None:
            check_sampling(item.fork.sampling, self._runner.vocab_size)
        fork_session(self._store, item, self._runner.new_matcher if self._is_last else None)

    @property
    def _is_last(self) -> bool:
        return self._runner.layers.end == self._runner.num_layers

    def _open(self, item: QueuedStep) -> _OpenStep | MeshError:
        if item.cancelled:
            return _cancelled(item)
        try:
            return self._open_decode(item) if item.step.cache == "decode" else self._open_new(item)
        except MeshError as error:
            return error
        except Exception as error:
            log.exception("step.failed", session=item.step.session, step_index=item.step.step_index)
            return failure_of(error)

    def _open_new(self, item: QueuedStep) -> _OpenStep:
        step = item.step
        self._check_addressed(step)
        self._check(item, None)
        history = self._draw_from(item, None)
        if step.cache != "prefill" or self._store is None or not self.keeps_sessions:
            return _OpenStep(item, None, history)
        if self.refuses_new_sessions and not self._store.holds(step.session):
            raise StepFailed("draining", "the node is leaving and takes no new session")
        return _OpenStep(item, self._store.start(step, self._runner.new_cache()), history)

    def _open_decode(self, item: QueuedStep) -> _OpenStep:
        if self._store is None or not self.keeps_sessions:
            raise CacheMissed("disabled", session=item.step.session)
        if not self._store.holds(item.step.session):
            self._check_continues_here(item.step)
        session = self._store.lookup(item.step)
        try:
            self._check(item, session)
            check_rewind(item.step, session)
            opened = _OpenStep(item, session, self._draw_from(item, session))
        except BaseException:
            self._store.put_back(session)
            raise
        if item.step.rewind_from is not None:
            session.cache.rewind(item.step.past_len)  # nothing is refused from here on: a failure loses the session
        return opened

    def _check(self, item: QueuedStep, session: Session | None) -> None:
        check_lengths(item.step, self._runner.context_len or POSITIONS_MAX)
        self._runner.check(item.step, item.tensors)
        self._check_sampling(item.step, session)

    def _check_addressed(self, step: Step) -> None:
        if step.model != self._model:
            raise StepFailed("model_mismatch", f"the model here is {self._model}", field="model", limit=self._model)
        if step.layers != self._runner.layers:
            held = str(self._runner.layers)
            raise StepFailed("range_mismatch", f"the layers here are {held}", field="layers", limit=held)

    def _check_continues_here(self, step: Step) -> None:
        """A session that is not held may have gone with the range that was held before this one."""
        if step.model != self._model:
            raise CacheMissed("model_mismatch", session=step.session)
        if step.layers != self._runner.layers:
            raise CacheMissed("range_mismatch", session=step.session)

    def _check_sampling(self, step: Step, session: Session | None) -> None:
        samples = self._is_last and step.output_len != 0 and step.pool is None
        if samples and step.sampling is None and (session is None or session.sampling is None):
            raise bad_step("sampling", "is missing, and this hop draws the token")
        if step.sampling is not None:
            check_sampling(step.sampling, self._runner.vocab_size)

    def _draw_from(self, item: QueuedStep, session: Session | None) -> _History:
        """What the step's draw will need of the tokens before; they are written where a failed step leaves no trace.

        Raises:
            StepFailed: `bad_step`: the step, or an earlier one of the session, does not carry them.
        """
        step = item.step
        if not self._is_last:
            return _NO_HISTORY
        if session is not None and step.cache == "decode":
            params = step.sampling or session.sampling
            drawing = continue_drawing(session.drawing, params, self._runner.new_matcher)
        else:
            drawing = begin_drawing(step.sampling, self._runner.new_matcher)
        if drawing is None:
            return _NO_HISTORY
        token_ids = item.tensors.get("token_ids")
        if token_ids is None:
            raise bad_step("token_ids", "is missing, and the sampling parameters need the tokens before")
        return _History(drawing, drawing.history.write(step.past_len, token_ids))

    def _compute(self, opened: Sequence[_OpenStep]) -> list[PassOutput | MeshError]:
        if not opened:
            return []
        try:
            return self._runner.run([each.as_pass() for each in opened])
        except Exception as error:
            log.exception("steps.failed", sessions=[each.item.step.session for each in opened])
            return [failure_of(error)] * len(opened)

    def _close(self, opened: _OpenStep, result: PassOutput | MeshError) -> tuple[PassOutput, bool] | MeshError:
        session = opened.session
        if session is None or self._store is None:
            return result if isinstance(result, MeshError) else (result, False)
        if opened.item.cancelled:
            self._store.abort(session, "cancelled")
            return _cancelled(opened.item)
        if isinstance(result, MeshError):
            self._store.abort(session, "failed")
            return result
        expected_len = opened.item.step.past_len + opened.item.step.new_len
        if session.cache.length != expected_len:
            self._store.abort(session, "failed")
            log.error("cache.length_wrong", held=session.cache.length, expected=expected_len)
            return StepFailed("internal_error", f"the cache holds {session.cache.length}, expected {expected_len}")
        session.drawing = opened.history.drawing
        try:
            return result, self._store.commit(session, opened.item.step)
        except StepFailed as error:
            return error

    def _answer(
        self, item: QueuedStep, result: tuple[PassOutput, bool] | MeshError, started_at: float, busy_us: int
    ) -> Outcome:
        step = item.step
        self._count(step.cache or "stateless", result if isinstance(result, MeshError) else None)
        if isinstance(result, MeshError):
            return Outcome(item, failure_message(step, result))
        output, cached = result
        message = StepResult(
            session=step.session,
            step_index=step.step_index,
            epoch=step.epoch,
            cached=cached,
            token_ids=output.token_ids,
            text=output.text,
            compute_us=busy_us,
            queue_us=_microseconds(started_at - item.arrived_at),
        )
        return Outcome(item, message, output.tensors)

    def _count(self, mode: str, error: MeshError | None) -> None:
        with self._figures_lock:
            if isinstance(error, CacheMissed):
                self._figures.misses[error.reason] += 1
            elif error is not None:
                self._figures.errors[error.code] += 1
            else:
                self._figures.steps[mode] += 1


@dataclass(frozen=True, slots=True)
class _History:
    drawing: Drawing | None = None
    ids: memoryview | None = None


_NO_HISTORY = _History()


@dataclass(frozen=True, slots=True)
class _OpenStep:
    item: QueuedStep
    session: Session | None
    history: _History

    def as_pass(self) -> Pass:
        item, session = self.item, self.session
        sampling = item.step.sampling or (session.sampling if session else None)
        cache = session.cache if session else None
        drawing, ids = self.history.drawing, self.history.ids
        matcher = drawing.matcher if drawing else None
        return Pass(item.step, item.tensors, cache, sampling, lambda: item.cancelled, ids, matcher)


def failure_of(error: Exception) -> MeshError:
    """Any exception of a step as the error that answers it."""
    if isinstance(error, MeshError):
        return error
    if isinstance(error, MemoryError):
        return StepFailed("out_of_memory", "the node has no memory left for this step")
    return StepFailed("internal_error", f"the step failed: {type(error).__name__}")


def failure_message(step: Step, error: MeshError) -> Message:
    """The answer to a step that could not be served."""
    if isinstance(error, CacheMissed):
        held_len = error.fields.get("held_len")
        return CacheMiss(
            session=step.session,
            step_index=step.step_index,
            epoch=step.epoch,
            reason=error.reason,
            held_len=held_len if isinstance(held_len, int) else None,
        )
    return Error(
        code=error.code,
        message=error.message,
        session=step.session,
        step_index=step.step_index,
        epoch=step.epoch,
    )


def _cancelled(item: QueuedStep) -> StepFailed:
    return StepFailed(item.cancel_code, "the step was cancelled")


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
