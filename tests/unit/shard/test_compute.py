"""The compute thread: it never dies, and what nobody wants is not computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from shard.compute import FORKS_WAITING_MAX, ComputeThread
from shard.executor import Outcome
from shard.step_queue import QUEUED_STEPS_MAX, SHORT_POSITIONS_MAX, QueuedFork, QueuedStep
from shared.errors import StepFailed
from shared.layers import LayerRange
from shared.messages import Error, Fork, Message, Step, StepResult

WAIT_S = 5.0


class Gate:
    """An executor that stops at each step until it is let go on, or until the step is cancelled."""

    def __init__(self) -> None:
        self.entered: queue.Queue[QueuedStep] = queue.Queue()
        self.go_on = threading.Semaphore(0)
        self.raises: Exception | None = None

        self.forked: list[str] = []
        self.fork_done = threading.Event()

    def fork(self, item: QueuedFork) -> None:
        """Note it, unless it is not wanted any more."""
        if item.fork.session == "broken":
            raise RuntimeError("broken")
        if not item.cancelled:
            self.forked.append(item.fork.target)
        self.fork_done.set()

    def run(self, items: Sequence[QueuedStep]) -> list[Outcome]:
        """One step at a time."""
        (item,) = items
        self.entered.put(item)
        assert self.go_on.acquire(timeout=WAIT_S)
        if self.raises:
            raise self.raises
        code = item.cancel_code if item.cancelled else ""
        message: Message = (
            Error(code=code, session=item.step.session) if code else StepResult(session=item.step.session, step_index=0)
        )
        return [Outcome(item, message)]


class Bench:
    """A running thread and what it delivered."""

    def __init__(self, load: Callable[[], Gate] | None = None) -> None:
        self.gate = Gate()
        self.outcomes: queue.Queue[Outcome] = queue.Queue()
        self.loads: queue.Queue[Exception | None] = queue.Queue()
        self.thread = ComputeThread(
            load=load or (lambda: self.gate),
            deliver=self._deliver,
            loaded=self.loads.put,
        )
        self.thread.start()

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for each in outcomes:
            self.outcomes.put(each)

    def submit(self, session: str, *, epoch: int = 0, new_len: int = 1, link: object = None) -> QueuedStep:
        """Queue a step."""
        item = step(session, epoch=epoch, new_len=new_len, link=link)
        self.thread.submit(item)
        return item

    def wait_running(self) -> str:
        """The session whose step has begun."""
        return self.gate.entered.get(timeout=WAIT_S).step.session

    def finish_one(self) -> Message:
        """Let the running step end; its answer."""
        self.gate.go_on.release()
        return self.outcomes.get(timeout=WAIT_S).message


def step(session: str, *, epoch: int = 0, new_len: int = 1, link: object = None) -> QueuedStep:
    """A step."""
    return QueuedStep(
        Step(session=session, step_index=0, epoch=epoch, new_len=new_len, layers=LayerRange(0, 1), model="m"),
        {},
        link,
        0.0,
    )


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A thread that is ended with the test."""
    running = Bench()
    assert running.loads.get(timeout=WAIT_S) is None
    yield running
    running.thread.stop()
    running.gate.go_on.release(100)
    assert running.thread.join(WAIT_S)


def test_steps_are_run_and_delivered(bench: Bench) -> None:
    """A submitted step runs and its answer is delivered; then nothing is pending."""
    bench.submit("a")
    assert bench.wait_running() == "a"
    assert bench.thread.pending == 1
    assert isinstance(bench.finish_one(), StepResult)


def test_exception_of_the_executor_is_answered_and_survived(bench: Bench) -> None:
    """The outermost boundary answers with an error, and the next step is served."""
    bench.gate.raises = RuntimeError("a bug")
    bench.submit("a")
    bench.wait_running()
    message = bench.finish_one()
    assert isinstance(message, Error)
    assert message.code == "internal_error"
    bench.gate.raises = None
    bench.submit("b")
    bench.wait_running()
    assert isinstance(bench.finish_one(), StepResult)


def test_out_of_memory_has_its_own_code(bench: Bench) -> None:
    """Running out of memory anywhere is told apart from a bug."""
    bench.gate.raises = MemoryError()
    bench.submit("a")
    bench.wait_running()
    message = bench.finish_one()
    assert isinstance(message, Error)
    assert message.code == "out_of_memory"


def test_cancel_reaches_running_and_waiting_steps(bench: Bench) -> None:
    """The running step is flagged, the waiting ones are given back to be answered."""
    bench.submit("a")
    bench.wait_running()
    waiting = bench.submit("a")
    bench.submit("b")
    assert bench.thread.cancel("a") == [waiting]
    message = bench.finish_one()
    assert isinstance(message, Error)
    assert message.code == "cancelled"
    assert bench.wait_running() == "b"


def test_higher_epoch_replaces_waiting_and_stops_running_steps(bench: Bench) -> None:
    """After a re-route the old epoch's steps are not computed to the end."""
    bench.submit("a")
    bench.wait_running()
    old = bench.submit("a")
    assert bench.thread.submit(step("a", epoch=1)) == [old]
    message = bench.finish_one()
    assert isinstance(message, Error)
    assert message.code == "stale_epoch"
    bench.wait_running()
    assert isinstance(bench.finish_one(), StepResult)


def test_waiting_steps_of_a_closed_link_are_forgotten(bench: Bench) -> None:
    """Nobody would read their answers; the running one ends by itself."""
    link = object()
    bench.submit("a", link=link)
    bench.wait_running()
    bench.submit("b", link=link)
    bench.submit("c", link=link, new_len=SHORT_POSITIONS_MAX + 1)
    bench.submit("d")
    assert bench.thread.drop_link(link) == 2
    assert isinstance(bench.finish_one(), StepResult)
    assert bench.wait_running() == "d"


def test_full_queue_refuses(bench: Bench) -> None:
    """The queue's bound is reached as a typed error."""
    bench.submit("running")
    bench.wait_running()
    for number in range(QUEUED_STEPS_MAX):
        bench.submit(f"s{number}")
    assert bench.thread.queued == QUEUED_STEPS_MAX
    with pytest.raises(StepFailed, match="queue_full"):
        bench.submit("one more")


def test_stop_ends_the_thread_and_cancels_what_runs(bench: Bench) -> None:
    """Stopping flags the running step and forgets the waiting ones."""
    running = bench.submit("a")
    bench.wait_running()
    bench.submit("b")
    bench.thread.stop()
    assert running.cancelled
    assert not bench.thread.join(0.01)
    bench.finish_one()
    assert bench.thread.join(WAIT_S)
    assert bench.gate.entered.empty()


def test_failed_load_is_reported_and_ends_the_thread() -> None:
    """Whatever loading raises is handed on."""

    def load() -> Gate:
        raise OSError("no such weights")

    bench = Bench(load)
    assert isinstance(bench.loads.get(timeout=WAIT_S), OSError)
    assert bench.thread.join(WAIT_S)


def fork(target: str, session: str = "s", link: object = None) -> QueuedFork:
    """A fork."""
    return QueuedFork(Fork(session=session, target=target, past_len=1, layers=LayerRange(0, 1), model="m"), link)


def test_forks_go_before_waiting_steps_and_in_order(bench: Bench) -> None:
    """So the copy's own first step finds it; one that breaks the executor stops nobody."""
    bench.submit("running")
    bench.wait_running()
    bench.submit("waiting")
    for target in ("a", "b"):
        assert bench.thread.fork(fork(target))
    assert bench.thread.fork(fork("x", session="broken"))
    bench.submit("a")
    bench.finish_one()
    assert bench.wait_running() == "waiting"
    assert bench.gate.forked == ["a", "b"]
    bench.finish_one()
    assert bench.wait_running() == "a"
    bench.finish_one()


def test_forks_that_nobody_wants_are_not_done(bench: Bench) -> None:
    """Their copy was released, or their link is gone."""
    link = object()
    bench.submit("running")
    bench.wait_running()
    for target, owner in (("kept", None), ("released", None), ("gone", link)):
        bench.thread.fork(fork(target, link=owner))
    bench.thread.cancel("released")
    bench.thread.drop_link(link)
    bench.submit("next")
    bench.finish_one()
    assert bench.wait_running() == "next"
    assert bench.gate.forked == ["kept"]
    bench.finish_one()


def test_waiting_forks_are_bounded(bench: Bench) -> None:
    """One too many is left out, and said so."""
    bench.submit("running")
    bench.wait_running()
    assert all(bench.thread.fork(fork(f"t{i}")) for i in range(FORKS_WAITING_MAX))
    assert not bench.thread.fork(fork("one too many"))
    bench.finish_one()


def test_a_fork_alone_wakes_the_thread(bench: Bench) -> None:
    """It does not wait for a step to come along."""
    bench.thread.fork(fork("a"))
    assert bench.gate.fork_done.wait(WAIT_S)
    assert bench.gate.forked == ["a"]
