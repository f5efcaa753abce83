"""Invariant: whatever is asked of a node, in whatever order, a token it returns is the right one.

Sessions are prefilled, continued, repeated, rewound, forked, cancelled, released, expired and evicted at random,
and the stage fails at random, sometimes half way through. A client keeps what it has sent for each session. Where
the node answers a step with a token, it must be the token of exactly that history; anything else must be a
miss or an error. Where the sampling needs the tokens before, the fake stage compares the node's history with the
real one. And the node's figures must add up.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shard.executor import Executor
from shard.kv_cache import DropCause, SessionStore
from shard.step_queue import QueuedFork, QueuedStep
from shared.errors import StepFailed
from shared.layers import LayerRange
from shared.messages import CacheMiss, Error, Fork, SamplingParams, Step, StepResult
from tests.support.fake_clock import FakeClock
from tests.support.fake_model import expected_tokens
from tests.support.fake_runner import KV_BYTES_PER_TOKEN_AND_LAYER, FakeRunner, write_ids

LAYERS = LayerRange(0, 2)
BYTES_PER_TOKEN = 2 * KV_BYTES_PER_TOKEN_AND_LAYER
SESSIONS = st.sampled_from(["a", "b", "c", "d"])
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
ANSWER_CODES = {
    "bad_step",
    "cancelled",
    "duplicate_step",
    "fault",
    "internal_error",
    "kv_budget_exceeded",
    "stale_epoch",
}
"""What a step may be answered; `internal_error` only where the stage was told to fail."""
Fault = Literal["none", "before", "half way", "cancel"]
PLAIN = SamplingParams(temperature=0.0)
PENALIZED = SamplingParams(temperature=0.0, presence_penalty=1.0)
SAMPLING = st.sampled_from([PLAIN, PENALIZED])
FAULTS = st.sampled_from(["none"] * 6 + ["before", "half way", "cancel"])


class FaultyRunner(FakeRunner):
    """Fails when told to: before computing, or after half of it is in the cache."""

    fault: Fault = "none"

    def run(self, passes: list) -> list:  # type: ignore[type-arg, override]
        """As told, once."""
        fault, self.fault = self.fault, "none"
        if fault == "before":
            return [StepFailed("fault", "before computing")]
        outcomes = super().run(passes)
        if fault == "half way":
            for each in passes:
                if each.cache is not None:
                    each.cache.states[1] = 0
            raise RuntimeError("half way")
        return outcomes


class NodeMachine(RuleBasedStateMachine):
    """A node of two layers with room for three sessions of a few positions."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.runner = FaultyRunner(LAYERS, 2)
        self.store = SessionStore(ttl_s=100, sessions_max=3, bytes_max=20 * BYTES_PER_TOKEN, clock=self.clock)
        self.executor = Executor(runner=self.runner, store=self.store, model="m", clock=self.clock)
        self.sent: dict[str, list[int]] = {}
        self.epochs: dict[str, int] = {}
        self.sampling: dict[str, SamplingParams] = {}
        self.drawn: dict[str, SamplingParams] = {}
        self.step_index = 0

    def ask(self, step: Step, ids: list[int], fault: Fault) -> StepResult | CacheMiss | Error:
        """Run one step."""
        self.runner.fault = "none" if fault == "cancel" else fault
        item = QueuedStep(step, {"token_ids": write_ids(ids)}, None, self.clock.monotonic())
        self.runner.before = lambda _: item.cancel("cancelled") if fault == "cancel" else None
        message = self.executor.run([item])[0].message
        self.runner.fault = "none"
        assert isinstance(message, StepResult | CacheMiss | Error)
        assert fault == "half way" or not isinstance(message, Error) or message.code != "internal_error"
        assert (message.session, message.step_index, message.epoch) == (step.session, step.step_index, step.epoch)
        return message

    def step(self, session: str, ids: list[int], cache: Literal["prefill", "decode"] | None, past_len: int = 0) -> Step:
        """The next step of a session."""
        self.step_index += 1
        return Step(
            session=session,
            step_index=self.step_index,
            epoch=self.epochs.get(session, 0),
            cache=cache,
            past_len=past_len,
            new_len=len(ids),
            layers=LAYERS,
            model="m",
            sampling=None if cache == "decode" else self.sampling.get(session, PLAIN),
        )

    def check(self, message: StepResult | CacheMiss | Error, history: list[int], sampling: SamplingParams) -> bool:
        """Whether the step was served; then its token must be right."""
        if not isinstance(message, StepResult):
            assert isinstance(message, CacheMiss) or message.code in ANSWER_CODES, message
            return False
        assert list(message.token_ids or ()) == expected_tokens(history, 1, num_layers=2, sampling=sampling)
        return True

    @rule(session=SESSIONS, ids=IDS, fault=FAULTS, sampling=SAMPLING)
    def prefill(self, session: str, ids: list[int], fault: Fault, sampling: SamplingParams = PLAIN) -> None:
        """A new history, which counts only once it was served."""
        self.sampling[session] = sampling
        if self.check(self.ask(self.step(session, ids, "prefill"), ids, fault), ids, sampling):
            self.sent[session], self.drawn[session] = list(ids), sampling

    @rule(session=SESSIONS, ids=IDS, fault=FAULTS)
    def stateless(self, session: str, ids: list[int], fault: Fault) -> None:
        """Served beside the session, which it must not touch."""
        step = self.step(session, ids, None)
        self.check(self.ask(step, ids, fault), ids, step.sampling or PLAIN)

    @rule(session=SESSIONS, ids=IDS, fault=FAULTS, sampling=SAMPLING, twice=st.booleans())
    def decode(self, session: str, ids: list[int], fault: Fault, sampling: SamplingParams, twice: bool) -> None:
        """Continue what was sent, or begin; a second copy is never served."""
        if session not in self.sent:
            self.prefill(session, ids, "none", sampling)
        held = self.sent.get(session, [])
        step = self.step(session, ids, "decode", len(held))
        if not self.check(self.ask(step, ids, fault), held + ids, self.drawn.get(session, PLAIN)):
            return
        self.sent[session] = held + ids
        if twice:
            assert isinstance(self.ask(step, ids, "none"), CacheMiss)

    @rule(session=SESSIONS, copy=SESSIONS, sampling=st.sampled_from([None, PLAIN, PENALIZED]))
    def fork(self, session: str, copy: str, sampling: SamplingParams | None) -> None:
        """Copy what was sent, or begin. Made or not, no step finds what the copy held before."""
        if session not in self.sent:
            self.prefill(session, [2, 3], "none", sampling or PLAIN)
        held = list(self.sent.get(session, []))
        fork = Fork(
            session=session,
            target=copy,
            past_len=len(held),
            epoch=self.epochs.get(copy, 0),
            layers=LAYERS,
            model="m",
            sampling=sampling,
        )
        self.executor.fork(QueuedFork(fork, None))
        if session != copy:
            self.sent[copy], self.drawn[copy] = held, sampling or self.drawn.get(session, PLAIN)
        ids = [1]
        answer = self.ask(self.step(copy, ids, "decode", len(held)), ids, "none")
        if self.check(answer, held + ids, self.drawn.get(copy, PLAIN)):
            self.sent[copy] = held + ids

    @rule(session=SESSIONS, ids=IDS, past_len=st.integers(0, 12))
    def decode_elsewhere(self, session: str, ids: list[int], past_len: int) -> None:
        """A position that is not the held one is a miss."""
        message = self.ask(self.step(session, ids, "decode", past_len), ids, "none")
        held = self.sent.get(session, [])
        if past_len == len(held) and self.check(message, held + ids, self.drawn.get(session, PLAIN)):
            self.sent[session] = held + ids
        elif past_len != len(held):
            assert isinstance(message, CacheMiss)

    @rule(
        session=SESSIONS,
        ids=IDS,
        kept=st.integers(0, 12),
        wrong_by=st.sampled_from([0, 0, 0, 1, -1]),
        fault=FAULTS,
    )
    def rewind(self, session: str, ids: list[int], kept: int, wrong_by: int, fault: Fault) -> None:
        """Drop the last positions and go on from there; only from exactly what is held, and only once."""
        held = self.sent.get(session, [])
        past_len, rewind_from = min(kept, len(held)), max(0, len(held) + wrong_by)
        step = dataclasses.replace(self.step(session, ids, "decode", past_len), rewind_from=rewind_from)
        history = held[:past_len] + ids
        answer = self.ask(step, ids, fault)
        if rewind_from != len(held):
            assert not isinstance(answer, StepResult)
        if not self.check(answer, history, self.drawn.get(session, PLAIN)):
            return
        self.sent[session] = history
        assert not isinstance(self.ask(step, ids, "none"), StepResult)

    @rule(session=SESSIONS)
    def raise_epoch(self, session: str) -> None:
        """Another hop was rebuilt."""
        self.epochs[session] = self.epochs.get(session, 0) + 1

    @rule(session=SESSIONS, ids=IDS)
    def stale(self, session: str, ids: list[int]) -> None:
        """A late step of an epoch that the node has seen pass changes nothing."""
        self.raise_epoch(session)
        self.prefill(session, ids, "none")
        step = self.step(session, ids, "decode", len(ids))
        late = dataclasses.replace(step, epoch=step.epoch - 1)
        answer = self.ask(late, ids, "none")
        assert isinstance(answer, Error)
        assert answer.code == "stale_epoch"

    @rule(session=SESSIONS, cause=st.sampled_from(["released", "cancelled"]))
    def release(self, session: str, cause: DropCause) -> None:
        """The generation has ended."""
        self.store.release(session, cause)

    @rule(seconds=st.sampled_from([1.0, 60.0, 120.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, and the sweep runs."""
        self.clock.jump(seconds)
        self.store.sweep()

    @invariant()
    def figures_add_up(self) -> None:
        """Limits hold between steps, bytes are those of what is held, nothing stays pinned."""
        sessions, nbytes, _ = self.store.figures()
        listed = list(self.store._listed.values())
        assert sessions == len(listed) <= 3
        assert nbytes == sum(each.cache.nbytes for each in listed) <= 20 * BYTES_PER_TOKEN
        assert not any(each.pinned for each in listed)
        assert not self.store._prefilling


TestNodeNeverWrong = NodeMachine.TestCase
TestNodeNeverWrong.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
