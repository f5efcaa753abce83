"""Forks and histories through the executor and the store, by value: no threads, no sockets."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shard.executor import Executor, Outcome
from shard.kv_cache import SessionStore
from shard.runner import Pass, PassOutput
from shard.step_queue import QueuedFork, QueuedStep
from shared.layers import LayerRange
from shared.messages import CacheMiss, Error, Fork, SamplingParams, Step, StepResult
from shared.tensor_spec import WireTensor
from tests.support.fake_clock import FakeClock
from tests.support.fake_model import expected_tokens
from tests.support.fake_runner import KV_BYTES_PER_TOKEN_AND_LAYER, FakeRunner, write_ids

WHOLE = LayerRange(0, 2)
PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0.0)
PENALIZED = SamplingParams(temperature=0.0, presence_penalty=0.5, prompt_len=3)
BYTES_PER_TOKEN = 2 * KV_BYTES_PER_TOKEN_AND_LAYER


class Bench:
    """A node without threads that holds the whole model."""

    def __init__(self, runner: FakeRunner | None = None, *, caching: bool = True) -> None:
        self.clock = FakeClock()
        self.runner = runner or FakeRunner(WHOLE, 2)
        self.store = SessionStore(ttl_s=600, sessions_max=3, bytes_max=12 * BYTES_PER_TOKEN, clock=self.clock)
        store = self.store if caching else None
        self.executor = Executor(runner=self.runner, store=store, model="m", clock=self.clock)
        self.step_index = 0

    def outcome(self, session: str, ids: list[int], past_len: int = 0, **fields: object) -> Outcome:
        """What a prefill, or with `past_len` a decode, gives."""
        self.step_index += 1
        values: dict[str, object] = {
            "cache": "decode" if past_len else "prefill",
            "sampling": None if past_len else GREEDY,
            "layers": self.runner.layers,
            **fields,
        }
        step = Step(
            session=session, step_index=self.step_index, past_len=past_len, new_len=len(ids), model="m", **values
        )  # type: ignore[arg-type]
        return self.executor.run([QueuedStep(step, {"token_ids": write_ids(ids)}, None, 0.0)])[0]

    def tokens(self, session: str, ids: list[int], past_len: int = 0, **fields: object) -> list[int]:
        """The token of a step that must succeed."""
        message = self.outcome(session, ids, past_len, **fields).message
        assert isinstance(message, StepResult), message
        return list(message.token_ids or ())

    def failure(self, session: str, ids: list[int], past_len: int = 0, **fields: object) -> Error | CacheMiss:
        """What a step that must fail is answered."""
        message = self.outcome(session, ids, past_len, **fields).message
        assert isinstance(message, Error | CacheMiss), message
        return message

    def fork(self, session: str = "s", target: str = "t", past_len: int = 3, **fields: object) -> None:
        """Copy a session."""
        values: dict[str, object] = {"layers": self.runner.layers, "model": "m", **fields}
        fork = Fork(session=session, target=target, past_len=past_len, **values)  # type: ignore[arg-type]
        self.executor.fork(QueuedFork(fork, None))

    def refused(self, session: str = "t", past_len: int = 3, reason: str = "unknown") -> bool:
        """Whether there is no such copy: its decode is this miss."""
        answer = self.failure(session, [1], past_len)
        return isinstance(answer, CacheMiss) and answer.reason == reason


def test_copy_and_original_go_their_own_ways() -> None:
    """Each gives the tokens of its own history."""
    bench = Bench()
    bench.tokens("s", PROMPT)
    bench.fork()
    for session, own in (("s", 1), ("t", 2)):
        for i in range(2):
            history = [*PROMPT, *[own] * (i + 1)]
            assert bench.tokens(session, [own], 3 + i) == expected_tokens(history, 1, num_layers=2)
    figures = bench.executor.figures()
    assert figures.steps == {"prefill": 1, "fork": 1, "decode": 4}
    sessions, nbytes, _ = bench.store.figures()
    assert (sessions, nbytes) == (2, 10 * BYTES_PER_TOKEN)


def test_copy_draws_with_its_own_sampling() -> None:
    """Or with the original's, where the fork names none."""
    bench = Bench()
    seeded = SamplingParams(seed=1)
    bench.tokens("s", PROMPT, sampling=seeded)
    bench.fork(target="same")
    bench.fork(target="other", sampling=SamplingParams(seed=2))
    same, other = bench.tokens("same", [1], 3), bench.tokens("other", [1], 3)
    assert same == bench.tokens("s", [1], 3)
    assert same != other


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"past_len": 2}, "past_len_mismatch"),
        ({"layers": LayerRange(0, 1)}, "range_mismatch"),
        ({"model": "other"}, "model_mismatch"),
        ({"session": "never"}, "unknown"),
        ({"sampling": SamplingParams(banned_ids=(1000,))}, "bad_step"),
        ({"sampling": PENALIZED}, "bad_step"),
    ],
)
def test_fork_of_anything_else_does_nothing(fields: dict[str, object], counted: str) -> None:
    """It is counted, the copy is a miss, and the original goes on."""
    bench = Bench()
    bench.tokens("s", PROMPT)
    bench.fork(**fields)  # type: ignore[arg-type]
    figures = bench.executor.figures()
    assert figures.misses | figures.errors == {counted: 1}
    assert bench.refused()
    assert bench.tokens("s", [1], 3)


def test_fork_onto_itself_does_nothing() -> None:
    """The session stays as it was."""
    bench = Bench()
    bench.tokens("s", PROMPT)
    bench.fork(target="s")
    assert bench.tokens("s", [1], 3) == expected_tokens([*PROMPT, 1], 1, num_layers=2)
    assert bench.store.figures()[1] == 4 * BYTES_PER_TOKEN


def test_fork_takes_no_other_sessions_place() -> None:
    """At the limit of sessions, and at that of bytes, the others stay and the copy is a miss."""
    bench = Bench()
    for session in ("s", "a", "b"):
        bench.tokens(session, PROMPT)
    bench.fork()
    assert bench.executor.figures().errors == {"sessions_full": 1}
    assert bench.refused()
    bench.store.release("b")
    bench.tokens("a", [1, 2, 3, 4], 3)  # 3 + 7 of 12 positions
    bench.fork()
    assert bench.executor.figures().errors["kv_budget_exceeded"] == 1
    assert bench.refused()
    assert bench.store.holds("a")


def test_copy_replaces_what_its_id_named_before() -> None:
    """Also where there is then no copy: the old session must not be taken for it."""
    bench = Bench()
    bench.tokens("t", [9, 9, 9])
    bench.tokens("s", PROMPT)
    bench.fork()
    assert bench.tokens("t", [1], 3) == expected_tokens([*PROMPT, 1], 1, num_layers=2)
    bench.tokens("u", [9, 9, 9])
    bench.fork(session="never", target="u")
    assert bench.refused("u")


def test_late_fork_does_not_touch_a_newer_session() -> None:
    """An epoch below what the copy's id has seen changes nothing."""
    bench = Bench()
    bench.tokens("t", [9, 9, 9], epoch=2)
    bench.tokens("s", PROMPT)
    bench.fork(epoch=1)
    assert bench.executor.figures().errors == {"stale_epoch": 1}
    assert bench.tokens("t", [1], 3, epoch=2) == expected_tokens([9, 9, 9, 1], 1, num_layers=2)


def test_draining_node_makes_no_copy() -> None:
    """A copy is a new session."""
    bench = Bench()
    bench.tokens("s", PROMPT)
    bench.executor.refuses_new_sessions = True
    bench.fork()
    assert bench.executor.figures().errors == {"draining": 1}
    assert bench.refused()


def test_node_without_cache_makes_no_copy() -> None:
    """There is nothing to copy."""
    bench = Bench(caching=False)
    bench.fork()
    assert bench.executor.figures().misses == {"disabled": 1}


def test_copy_that_was_released_meanwhile_is_not_kept() -> None:
    """Before it is made, or while it is."""
    bench = Bench()
    bench.tokens("s", PROMPT)
    item = QueuedFork(Fork(session="s", target="t", past_len=3, layers=WHOLE, model="m"), None, cancelled=True)
    bench.executor.fork(item)
    assert bench.refused()
    source, copy = bench.store.open_fork(item.fork)
    bench.store.release("t")
    copy.cache = source.cache.copy()
    assert not bench.store.commit_fork(source, copy)
    assert bench.refused()
    assert bench.tokens("s", [1], 3)


def test_copying_that_fails_leaves_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the copy: counted, and nothing stays pinned."""
    bench = Bench()
    bench.tokens("s", PROMPT)

    def no_memory(_cache: object) -> object:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("tests.support.fake_runner.FakeCache.copy", no_memory)
        bench.fork()
    assert bench.executor.figures().errors == {"out_of_memory": 1}
    assert bench.refused()
    assert bench.tokens("s", [1], 3)


def test_history_moves_with_the_position() -> None:
    """The fake stage compares it with the real tokens at every step: prefill, chunk, decode, fork, rebuild."""
    bench = Bench()
    assert not bench.tokens("s", [5, 6], sampling=PENALIZED, output_len=0)
    bench.tokens("s", [7], 2)
    bench.fork(sampling=SamplingParams(temperature=0.0, frequency_penalty=1.0))
    bench.tokens("s", [1], 3)
    bench.tokens("t", [2], 3)
    bench.tokens("t", [2], 4)
    bench.tokens("s", [5, 6, 7, 1, 8], sampling=PENALIZED, epoch=1)
    bench.tokens("s", [1], 5, epoch=1)
    bench.tokens("x", PROMPT, cache=None, sampling=PENALIZED)


def test_refused_step_leaves_the_history() -> None:
    """What it brought is written over by the step that is served."""
    bench = Bench()
    bench.tokens("s", PROMPT, sampling=PENALIZED)
    assert bench.failure("s", [8], 3, sampling=SamplingParams(top_p=-1.0)).kind == "error"
    assert bench.failure("s", [8], 3, output_len=2).kind == "error"
    assert bench.tokens("s", [1], 3) == expected_tokens([*PROMPT, 1], 1, num_layers=2, sampling=PENALIZED)


def test_step_without_its_tokens_is_named() -> None:
    """Where the draw needs them, of every mode; the session stays."""
    last = FakeRunner(LayerRange(1, 2), 2)
    bench = Bench(last)
    fields = {"session": "s", "step_index": 1, "layers": last.layers, "model": "m", "sampling": PENALIZED}
    for step in (Step(**fields, cache="prefill"), Step(**fields)):  # type: ignore[arg-type]
        message = bench.executor.run([QueuedStep(step, hidden_states_of([1]), None, 0.0)])[0].message
        assert isinstance(message, Error)
        assert message.code == "bad_step"
        assert message.message.startswith("token_ids is missing")


def hidden_states_of(ids: list[int]) -> Mapping[str, WireTensor]:
    """What the first layer makes of these ids."""
    step = Step(session="s", step_index=0, new_len=len(ids), layers=LayerRange(0, 1), model="m")
    first = FakeRunner(LayerRange(0, 1), 2)
    (output,) = first.run([Pass(step, {"token_ids": write_ids(ids)}, None, None, lambda: False)])
    assert isinstance(output, PassOutput)
    return output.tensors


def test_sampling_that_needs_a_history_cannot_come_late() -> None:
    """The earlier steps did not carry theirs: an error, not a draw from half a history. The session goes on."""
    bench = Bench()
    bench.tokens("s", PROMPT)
    answer = bench.failure("s", [1], 3, sampling=PENALIZED)
    assert isinstance(answer, Error)
    assert (answer.code, answer.message.split()[0]) == ("bad_step", "sampling")
    assert bench.tokens("s", [1], 3)


def test_plain_sessions_keep_no_history() -> None:
    """Nor does one whose sampling stops needing it."""
    bench = Bench()
    bench.tokens("s", PROMPT)
    assert bench.store._listed["s"].drawing is None
    bench.tokens("t", PROMPT, sampling=PENALIZED)
    assert bench.store._listed["t"].drawing is not None
    bench.tokens("t", [1], 3, sampling=GREEDY)
    assert bench.store._listed["t"].drawing is None


def test_hop_that_is_not_last_needs_no_history() -> None:
    """Whatever the sampling says; and its sessions are copied all the same."""
    bench = Bench(FakeRunner(LayerRange(0, 1), 2))
    bench.outcome("s", PROMPT, sampling=PENALIZED)
    assert bench.store._listed["s"].drawing is None
    bench.fork(sampling=PENALIZED)
    assert bench.store.holds("t")


def test_pool_and_score_need_no_sampling_where_nothing_is_drawn() -> None:
    """An embedding never draws; a scored chunk need not."""
    bench = Bench()
    pooled = bench.outcome("s", PROMPT, cache=None, sampling=None, pool="mean")
    assert isinstance(pooled.message, StepResult)
    assert pooled.message.token_ids is None
    assert pooled.tensors["embedding"].shape == (4,)
    answer = bench.failure("s", PROMPT, cache=None, sampling=None, score=0, output_len=0)
    assert isinstance(answer, Error)
    assert answer.message.startswith("target_ids")
