"""Steps through the executor, by value: no threads, no sockets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import pytest

from shard.executor import Executor, Outcome
from shard.kv_cache import SessionStore
from shard.runner import Pass, PassOutput
from shard.step_check import STEP_POSITIONS_MAX
from shard.step_queue import QueuedStep
from shared.errors import MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import CacheMiss, Error, SamplingParams, Step, StepResult
from shared.tensor_spec import WireTensor
from tests.support.fake_clock import FakeClock
from tests.support.fake_model import expected_tokens
from tests.support.fake_runner import FakeRunner, text_of, write_ids

WHOLE = LayerRange(0, 2)
GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """An executor over a fake stage that holds the whole model."""

    def __init__(self, runner: FakeRunner | None = None, *, bytes_max: int = 100_000, caching: bool = True) -> None:
        self.clock = FakeClock()
        self.runner = runner or FakeRunner(WHOLE, 2)
        self.store = SessionStore(ttl_s=600, sessions_max=8, bytes_max=bytes_max, clock=self.clock)
        store = self.store if caching else None
        self.executor = Executor(runner=self.runner, store=store, model="m", clock=self.clock)

    def run(self, *steps: Step, ids: list[int] | None = None) -> list[Outcome]:
        """Run steps together, each with as many ids as it says, or with these."""
        items = [
            QueuedStep(step, _ids(ids or list(range(step.new_len))), None, self.clock.monotonic()) for step in steps
        ]
        return self.executor.run(items)

    def answer(self, step: Step, ids: list[int] | None = None) -> StepResult | CacheMiss | Error:
        """The answer to one step."""
        message = self.run(step, ids=ids)[0].message
        assert isinstance(message, StepResult | CacheMiss | Error)
        return message

    def result(self, step: Step, ids: list[int] | None = None) -> StepResult:
        """The result of a step that must succeed."""
        message = self.answer(step, ids)
        assert isinstance(message, StepResult), message
        return message

    def error(self, step: Step, ids: list[int] | None = None) -> Error:
        """The error of a step that must fail."""
        message = self.answer(step, ids)
        assert isinstance(message, Error), message
        return message


def _ids(ids: list[int]) -> Mapping[str, WireTensor]:
    return {"token_ids": write_ids(ids)}


def prefill(new_len: int = 3, **fields: object) -> Step:
    """A prefill of the whole model."""
    return step(cache="prefill", new_len=new_len, **fields)


def decode(past_len: int, **fields: object) -> Step:
    """A decode of one position, which keeps the sampling of the prefill."""
    return step(**{"cache": "decode", "past_len": past_len, "step_index": past_len, "sampling": None, **fields})


def step(**fields: object) -> Step:
    """A step that is right for the bench."""
    values: dict[str, object] = {"session": "s", "step_index": 0, "layers": WHOLE, "model": "m", "sampling": GREEDY}
    return Step(**{**values, **fields})  # type: ignore[arg-type]


def generate(bench: Bench, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens through prefill and decode."""
    tokens = list(bench.result(prefill(len(prompt)), prompt).token_ids or ())
    for past_len in range(len(prompt), len(prompt) + count - 1):
        tokens += bench.result(decode(past_len), tokens[-1:]).token_ids or ()
    return tokens


def test_cached_generation_gives_the_models_tokens() -> None:
    """Prefill and decode give what the model gives when it sees everything."""
    assert generate(Bench(), [5, 6, 7], 12) == expected_tokens([5, 6, 7], 12, num_layers=2)


def test_stateless_step_gives_the_same_token_and_keeps_nothing() -> None:
    """Without a cache mode the step is served from its own positions alone."""
    bench = Bench()
    result = bench.result(step(new_len=3), [5, 6, 7])
    assert result.token_ids == tuple(expected_tokens([5, 6, 7], 1, num_layers=2))
    assert not result.cached
    assert bench.store.figures()[0] == 0
    assert bench.executor.figures().steps == {"stateless": 1}


@pytest.mark.parametrize("how", ["caching off", "model rejects a cache"])
def test_prefill_without_cache_is_served_and_decode_misses(how: str) -> None:
    """Caching off or unsupported degrades: the prefill's answer is right, `cached` false, decode is `disabled`."""
    supports = how == "caching off"
    bench = Bench(FakeRunner(WHOLE, 2, supports_kv_cache=supports), caching=not supports)
    result = bench.result(prefill(), [5, 6, 7])
    assert result.token_ids == tuple(expected_tokens([5, 6, 7], 1, num_layers=2))
    assert not result.cached
    answer = bench.answer(decode(3))
    assert isinstance(answer, CacheMiss)
    assert answer.reason == "disabled"


def test_miss_says_what_is_held_and_is_counted() -> None:
    """A miss carries the held length, the step's index and epoch."""
    bench = Bench()
    bench.result(prefill())
    answer = bench.answer(decode(7, epoch=2))
    assert answer == CacheMiss(session="s", step_index=7, epoch=2, reason="past_len_mismatch", held_len=3)
    assert bench.executor.figures().misses == {"past_len_mismatch": 1}


@pytest.mark.parametrize(
    ("fields", "code"), [({"model": "other"}, "model_mismatch"), ({"layers": LayerRange(0, 1)}, "range_mismatch")]
)
@pytest.mark.parametrize("cache", ["prefill", None])
def test_prefill_for_another_range_or_model_is_refused(cache: str | None, fields: dict[str, object], code: str) -> None:
    """A step that starts anew cannot miss a cache, so a wrong address is an error naming what is here."""
    assert Bench().error(step(cache=cache, new_len=3, **fields)).code == code


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (prefill(0), "new_len must be from 1"),
        (prefill(STEP_POSITIONS_MAX + 1), f"new_len must be from 1 to {STEP_POSITIONS_MAX}"),
        (prefill(3, past_len=1), "past_len must be 0"),
        (prefill(3, output_len=4), "output_len must be at most new_len 3"),
        (prefill(101), "past_len \\+ new_len must be at most 100"),
        (prefill(sampling=None), "sampling is missing"),
        (prefill(sampling=SamplingParams(temperature=-1.0)), "sampling.temperature"),
        (prefill(sampling=SamplingParams(top_p=1.5)), "sampling.top_p"),
    ],
)
def test_bad_step_is_named_and_disturbs_nobody(wrong: Step, names: str) -> None:
    """Each wrong field is answered by name and limit, and another session goes on."""
    bench = Bench(FakeRunner(WHOLE, 2, context_len=100))
    bench.result(prefill(session="other"))
    wrong = dataclasses.replace(wrong, session="bad")
    error = bench.run(wrong, ids=[1, 2, 3])[0].message
    assert isinstance(error, Error)
    assert error.code == "bad_step"
    assert re.search(names, error.message)
    assert bench.result(decode(3, session="other")).cached


def test_decode_of_a_wrong_shape_keeps_the_session() -> None:
    """A decode refused before computing leaves the session; the right one is served after it."""
    bench = Bench()
    bench.result(prefill())
    assert bench.error(decode(3), [1, 2]).code == "bad_step"
    assert bench.error(decode(3, sampling=SamplingParams(top_p=-1.0))).code == "bad_step"
    assert bench.result(decode(3)).cached


def test_token_id_out_of_the_vocabulary_is_refused() -> None:
    """An id that the embedding does not have never reaches it."""
    assert Bench().error(prefill(1), [1000]).code == "bad_step"


def test_output_len_zero_samples_nothing() -> None:
    """A chunk that is not the last gives no token and needs no sampling."""
    bench = Bench()
    result = bench.result(prefill(output_len=0, sampling=None), [5, 6, 7])
    assert result.token_ids is None
    assert bench.result(decode(3, new_len=2, sampling=GREEDY), [8, 9]).token_ids == tuple(
        expected_tokens([5, 6, 7, 8, 9], 1, num_layers=2)
    )


def test_old_tail_gives_text() -> None:
    """A tail that cannot return ids says so by returning text."""
    result = Bench(FakeRunner(WHOLE, 2, text_tail=True)).result(prefill(), [5, 6, 7])
    assert result.token_ids is None
    assert result.text == text_of(expected_tokens([5, 6, 7], 1, num_layers=2)[0])


def test_inner_hop_returns_the_last_positions_hidden_states() -> None:
    """`output_len` cuts what travels; absent returns all that entered."""
    bench = Bench(FakeRunner(LayerRange(0, 1), 2))
    first = prefill(layers=LayerRange(0, 1), output_len=2, sampling=None)
    assert bench.run(first)[0].tensors["hidden_states"].shape == (1, 2, 4)
    whole = prefill(layers=LayerRange(0, 1), step_index=1, sampling=None)
    assert bench.run(whole)[0].tensors["hidden_states"].shape == (1, 3, 4)


def failing(error: Exception, session: str = "s") -> Callable[[Step], None]:
    """A stage that raises on one session's second step."""

    def before(each: Step) -> None:
        if each.session == session and each.step_index:
            raise error

    return before


def test_failed_decode_drops_its_session_and_no_other() -> None:
    """After a failure inside the stage that session is unknown, the others are as they were."""
    bench = Bench(FakeRunner(WHOLE, 2, before=failing(StepFailed("boom", "it broke"))))
    bench.result(prefill())
    bench.result(prefill(session="other", step_index=0))
    assert bench.error(decode(3)).code == "boom"
    answer = bench.answer(decode(3))
    assert isinstance(answer, CacheMiss)
    assert answer.reason == "unknown"
    assert bench.store.holds("other")


def test_failed_prefill_leaves_the_held_session() -> None:
    """A replacement that fails replaces nothing."""
    bench = Bench(FakeRunner(WHOLE, 2, before=failing(StepFailed("boom", "it broke"))))
    bench.result(prefill())
    assert bench.error(prefill(step_index=5, epoch=1)).code == "boom"
    assert bench.store.holds("s")


@pytest.mark.parametrize(
    ("raised", "code"),
    [(MemoryError(), "out_of_memory"), (RuntimeError("secret"), "internal_error"), (KeyError("x"), "internal_error")],
)
def test_exception_of_the_stage_is_an_error_answer(raised: Exception, code: str) -> None:
    """Whatever the stage raises is answered with a code, without its text, and the executor goes on."""
    bench = Bench(FakeRunner(WHOLE, 2, before=failing(raised)))
    bench.result(prefill())
    error = bench.error(decode(3))
    assert error.code == code
    assert "secret" not in error.message
    assert bench.result(prefill(session="t")).cached
    assert bench.executor.figures().errors == {code: 1}


def test_cancelled_step_is_answered_and_nothing_is_kept() -> None:
    """A step cancelled while waiting is not computed; cancelled while running its session goes."""
    bench = Bench()
    waiting = QueuedStep(prefill(), _ids([1, 2, 3]), None, 0.0)
    waiting.cancel("cancelled")
    error = bench.executor.run([waiting])[0].message
    assert isinstance(error, Error)
    assert error.code == "cancelled"
    assert bench.runner.seen == []

    bench.result(prefill())
    running = QueuedStep(decode(3), _ids([1]), None, 0.0)
    bench.runner.before = lambda _: running.cancel("stale_epoch")
    error = bench.executor.run([running])[0].message
    assert isinstance(error, Error)
    assert error.code == "stale_epoch"
    assert not bench.store.holds("s")


def test_list_of_steps_gets_one_answer_each_in_order() -> None:
    """Several sessions run together; one that fails has its own answer."""
    bench = Bench()
    for session in ("a", "b"):
        bench.result(prefill(session=session))
    outcomes = bench.run(
        decode(3, session="a"), decode(9, session="b"), prefill(1, session="c"), step(new_len=1, model="x"), ids=[1]
    )
    assert [type(each.message) for each in outcomes] == [StepResult, CacheMiss, StepResult, Error]
    assert [each.item.step.session for each in outcomes] == ["a", "b", "c", "s"]


def test_session_over_the_budget_fails_with_the_limit() -> None:
    """A session larger than the whole budget is an error, again and again, and evicts nobody."""
    bench = Bench(bytes_max=1000)
    bench.result(prefill(1, session="small"))
    for step_index in (0, 1):
        error = bench.error(prefill(6, step_index=step_index))
        assert error.code == "kv_budget_exceeded"
        assert "kv_bytes_max is 1000" in error.message
    assert bench.store.holds("small")


def test_draining_node_takes_no_new_session() -> None:
    """Held sessions go on, a new one is refused."""
    bench = Bench()
    bench.result(prefill())
    bench.executor.refuses_new_sessions = True
    assert bench.result(decode(3)).cached
    assert bench.error(prefill(session="t")).code == "draining"


class ForgetfulRunner(FakeRunner):
    """A stage that computes but does not fill the cache."""

    def run(self, passes: list[Pass]) -> list[PassOutput | MeshError]:  # type: ignore[override]
        """Nothing enters the cache."""
        return super().run([dataclasses.replace(each, cache=None) for each in passes])


def test_cache_that_did_not_grow_is_never_kept() -> None:
    """If the stage's cache is not where the step should have left it, the session is dropped, not trusted."""
    bench = Bench(ForgetfulRunner(WHOLE, 2))
    assert bench.error(prefill()).code == "internal_error"
    assert not bench.store.holds("s")


def test_times_are_reported() -> None:
    """`queue_us` is how long the step waited."""
    bench = Bench()
    item = QueuedStep(prefill(), _ids([1, 2, 3]), None, bench.clock.monotonic())
    bench.clock.jump(0.25)
    message = bench.executor.run([item])[0].message
    assert isinstance(message, StepResult)
    assert message.queue_us == 250_000


def test_going_back_gives_the_tokens_of_what_is_left() -> None:
    """As if what was dropped had never been there; what is held afterwards is what a plain decode must name."""
    bench = Bench()
    bench.result(prefill(), [5, 6, 7])
    bench.result(decode(3, new_len=4), [1, 2, 3, 4])
    result = bench.result(decode(4, rewind_from=7, step_index=8, new_len=2), [8, 9])
    assert result.token_ids == tuple(expected_tokens([5, 6, 7, 1, 8, 9], 1, num_layers=2))
    assert bench.result(decode(6, step_index=9), [3]).token_ids == tuple(
        expected_tokens([5, 6, 7, 1, 8, 9, 3], 1, num_layers=2)
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"past_len": 2}, "past_len_mismatch"),
        ({"past_len": 2, "rewind_from": 4}, "past_len_mismatch"),
        ({"past_len": 2, "rewind_from": 2}, "past_len_mismatch"),
    ],
)
def test_going_back_must_be_asked_for_exactly(fields: dict[str, int], reason: str) -> None:
    """A node never guesses: it must hold what the step says that it holds, and the step must say so."""
    bench = Bench()
    bench.result(prefill(), [5, 6, 7])
    answer = bench.answer(decode(**{"step_index": 1, **fields}))
    assert isinstance(answer, CacheMiss)
    assert (answer.reason, answer.held_len) == (reason, 3)
    assert bench.result(decode(3), [1]).token_ids == tuple(expected_tokens([5, 6, 7, 1], 1, num_layers=2))


def test_a_cache_that_cannot_go_back_is_a_miss_and_stays() -> None:
    """The session is as it was, and goes on from where it is."""
    bench = Bench(FakeRunner(WHOLE, 2, rewinds=False))
    bench.result(prefill(), [5, 6, 7])
    answer = bench.answer(decode(2, rewind_from=3, step_index=4))
    assert isinstance(answer, CacheMiss)
    assert (answer.reason, answer.held_len) == ("not_rewindable", 3)
    assert bench.result(decode(3), [1]).token_ids == tuple(expected_tokens([5, 6, 7, 1], 1, num_layers=2))


@pytest.mark.parametrize(
    "fields", [{"cache": "prefill", "past_len": 0}, {"cache": None, "past_len": 0}, {"past_len": 4}]
)
def test_going_back_belongs_to_a_decode_and_goes_back(fields: dict[str, object]) -> None:
    """Anything else that carries the field is wrong, and the session stays."""
    bench = Bench()
    bench.result(prefill(), [5, 6, 7])
    error = bench.error(decode(**{"past_len": 2, "rewind_from": 3, "step_index": 4, "sampling": GREEDY, **fields}))
    assert error.code == "bad_step"
    assert error.message.startswith("rewind_from must be at least past_len")
    assert bench.result(decode(3, step_index=5), [1]).cached


def test_a_refused_step_that_goes_back_leaves_the_session() -> None:
    """Dropping and computing are one: where nothing is computed nothing is dropped, the history neither."""
    bench = Bench()
    sampling = SamplingParams(temperature=0.0, presence_penalty=1.0)
    bench.result(prefill(sampling=sampling), [5, 6, 7])
    assert bench.error(decode(2, rewind_from=3, step_index=4), [2000]).code == "bad_step"
    expected = expected_tokens([5, 6, 7, 1], 1, num_layers=2, sampling=sampling)
    assert bench.result(decode(3, step_index=5), [1]).token_ids == tuple(expected)


def test_a_step_that_goes_back_and_fails_loses_the_session() -> None:
    """What was dropped is gone, and what was to come is not there."""
    bench = Bench(FakeRunner(WHOLE, 2, before=failing(StepFailed("boom", "it broke"))))
    bench.result(prefill())
    assert bench.error(decode(2, rewind_from=3, step_index=1)).code == "boom"
    assert not bench.store.holds("s")


def test_a_step_that_goes_back_is_applied_once() -> None:
    """Its second copy may find the very length that it names: the step's number tells."""
    bench = Bench()
    bench.result(prefill(), [5, 6, 7])
    again = decode(2, rewind_from=3, step_index=4)
    bench.result(again, [1])
    bench.result(decode(2, rewind_from=3, step_index=5), [2])
    assert bench.error(again, [1]).code == "duplicate_step"
    expected = expected_tokens([5, 6, 2, 9], 1, num_layers=2)
    assert bench.result(decode(3, step_index=6), [9]).token_ids == tuple(expected)


def test_the_history_goes_back_too() -> None:
    """A draw that depends on the tokens before does not remember those that were dropped."""
    bench = Bench()
    sampling = SamplingParams(temperature=0.0, presence_penalty=1.0)
    bench.result(prefill(sampling=sampling), [5, 6, 7])
    bench.result(decode(3, new_len=2), [1, 2])
    result = bench.result(decode(4, rewind_from=5, step_index=6), [8])
    assert result.token_ids == tuple(expected_tokens([5, 6, 7, 1, 8], 1, num_layers=2, sampling=sampling))
