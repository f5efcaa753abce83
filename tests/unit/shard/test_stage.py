"""A stage serves steps, refuses wrong ones by name, and stops when told to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shard.loader import load_stage
from shard.session_cache import StageCache
from shard.stage import CallNames, Stage, StageInput
from shared.errors import StepFailed
from shared.layers import LayerRange
from tests.conftest import TinyModels
from tests.support.odd_models import POSITIONS_MAX, build_odd_model
from tests.support.tiny_models import NUM_LAYERS

HIDDEN_SIZE = 32
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def first(tiny_model: TinyModels) -> Stage:
    """The first half of a model."""
    return load_stage(tiny_model("qwen2"), LayerRange(0, 3), device="cpu")


@pytest.fixture(scope="module")
def last(tiny_model: TinyModels) -> Stage:
    """The second half, with the head."""
    return load_stage(tiny_model("qwen2"), LayerRange(3, NUM_LAYERS), device="cpu")


@pytest.fixture(scope="module")
def hybrid(tiny_model: TinyModels) -> Stage:
    """A whole model with linear attention."""
    return load_stage(tiny_model("qwen3_next"), LayerRange(0, NUM_LAYERS), device="cpu")


def hidden_states(new_len: int = 4) -> torch.Tensor:
    """What a hop before could have given."""
    return torch.randn(1, new_len, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))


def test_attributes_describe_the_range(first: Stage, last: Stage) -> None:
    """What a node tells the mesh."""
    assert (first.is_first, first.is_last) == (True, False)
    assert (last.is_first, last.is_last) == (False, True)
    assert first.num_layers == NUM_LAYERS
    assert str(first.device) == "cpu"
    assert first.dtype is torch.float32
    assert first.context_len == 2048
    assert first.supports_kv_cache
    assert first.no_cache_reason is None
    assert first.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(("output_len", "expected"), [(None, 4), (4, 4), (2, 2), (0, 0)])
def test_a_stage_that_is_not_last_returns_the_last_positions(first: Stage, output_len: int, expected: int) -> None:
    """As many as asked for, contiguous."""
    output = first.run(StageInput(token_ids=IDS, output_len=output_len))
    assert output.shape == (1, expected, HIDDEN_SIZE)
    assert output.is_contiguous()
    whole = first.run(StageInput(token_ids=IDS))
    assert torch.equal(output, whole[:, 4 - expected :])


def test_the_last_stage_returns_the_last_positions_logits(last: Stage) -> None:
    """One row of the vocabulary, or nothing where none is wanted."""
    assert last.run(StageInput(hidden_states=hidden_states())).shape == (last.vocab_size,)
    assert last.run(StageInput(hidden_states=hidden_states(), output_len=0)).shape == (0,)


def test_the_head_sees_one_position(last: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of many positions costs one row of the head."""
    seen: list[torch.Size] = []
    head = last._model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    try:
        last.run(StageInput(hidden_states=hidden_states(7)))
        last.run(StageInput(hidden_states=hidden_states(7), output_len=0))
    finally:
        handle.remove()
    assert seen == [torch.Size((1, 1, HIDDEN_SIZE))]


def test_a_list_of_steps_gives_a_list_of_outputs(first: Stage) -> None:
    """In order."""
    items = [StageInput(token_ids=IDS), StageInput(token_ids=IDS[:, :2])]
    assert [output.shape[1] for output in first.forward(items)] == [4, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_any_integer_type_of_ids_is_taken(first: Stage, dtype: torch.dtype) -> None:
    """The wire carries i32."""
    assert torch.equal(first.run(StageInput(token_ids=IDS.to(dtype))), first.run(StageInput(token_ids=IDS)))


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        (None, "needs token_ids"),
        (torch.tensor([5, 6]), r"shape \[1, new_len\]"),
        (torch.zeros((1, 0), dtype=torch.long), r"shape \[1, new_len\]"),
        (torch.zeros((2, 3), dtype=torch.long), r"shape \[1, new_len\]"),
        (torch.tensor([[1.0]]), "integers"),
        (torch.tensor([[True]]), "integers"),
        (torch.tensor([[3, -1]]), "from 0 to"),
        (torch.tensor([[3, 10**6]]), "from 0 to"),
    ],
)
def test_wrong_token_ids_are_refused(first: Stage, token_ids: torch.Tensor | None, words: str) -> None:
    """By shape, type and range, before anything is computed."""
    with pytest.raises(StepFailed, match=words) as caught:
        first.run(StageInput(token_ids=token_ids))
    assert caught.value.code == "bad_step"
    assert caught.value.fields == {"field": "token_ids"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "needs hidden_states"),
        (torch.zeros((1, 4), dtype=torch.long), "floating point"),
        (torch.zeros(4), "no positions at axis 1"),
        (torch.zeros(1, 0, HIDDEN_SIZE), "no positions"),
        (torch.zeros(1, 4, HIDDEN_SIZE + 1), r"shape \[1, 4, 33\], this model's layers pass on \[1, 4, 32\]"),
        (torch.zeros(2, 4, HIDDEN_SIZE), "pass on"),
        (torch.zeros(1, 4, 1, HIDDEN_SIZE), "pass on"),
    ],
)
def test_wrong_hidden_states_are_refused(last: Stage, wrong: torch.Tensor | None, words: str) -> None:
    """The message says what was expected, and the cache is as before."""
    cache = last.new_cache()
    with pytest.raises(StepFailed, match=words) as caught:
        last.run(StageInput(hidden_states=wrong, cache=cache))
    assert caught.value.code == "bad_step"
    assert caught.value.fields["field"] == "hidden_states"
    assert (cache.length, cache.damaged) == (0, False)


@pytest.mark.parametrize("output_len", [5, -1])
def test_an_impossible_output_len_is_refused(first: Stage, output_len: int) -> None:
    """No more outputs than positions."""
    with pytest.raises(StepFailed, match="output_len"):
        first.run(StageInput(token_ids=IDS, output_len=output_len))


def test_hidden_states_of_another_type_are_converted(last: Stage) -> None:
    """A node that computes in bfloat16 may come before one in float32."""
    logits = last.run(StageInput(hidden_states=hidden_states().bfloat16()))
    assert logits.dtype is torch.float32


def test_a_cache_of_another_length_is_our_own_bug(first: Stage) -> None:
    """The session store has checked before."""
    with pytest.raises(ValueError, match="holds 0 positions"):
        first.run(StageInput(token_ids=IDS, cache=first.new_cache(), past_len=3))
    with pytest.raises(ValueError, match="holds 0 positions"):
        first.run(StageInput(token_ids=IDS, past_len=3))


def cancel_after(checks: int) -> tuple[list[int], StageInput]:
    """A step that is cancelled once it has been asked so many times."""
    asked = [0]

    def cancelled() -> bool:
        asked[0] += 1
        return asked[0] > checks

    return asked, StageInput(token_ids=IDS, cancelled=cancelled)


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_a_cancelled_step_stops_at_the_next_layer(first: Stage, checks: int) -> None:
    """Asked before each layer, and never again."""
    asked, item = cancel_after(checks)
    with pytest.raises(StepFailed) as caught:
        first.run(item)
    assert caught.value.code == "cancelled"
    assert asked == [checks + 1]


def with_cache(item: StageInput, cache: StageCache) -> StageInput:
    """The same step on a session."""
    return StageInput(token_ids=item.token_ids, cache=cache, past_len=cache.length, cancelled=item.cancelled)


def test_a_cancelled_step_leaves_the_session_as_it_was(first: Stage) -> None:
    """The next step gives what it would have given."""
    cache, undisturbed = first.new_cache(), first.new_cache()
    for each in (cache, undisturbed):
        first.run(StageInput(token_ids=IDS, cache=each))
    with pytest.raises(StepFailed):
        first.run(with_cache(cancel_after(2)[1], cache))
    assert (cache.length, cache.damaged) == (4, False)
    outputs = [first.run(StageInput(token_ids=IDS, cache=each, past_len=4)) for each in (cache, undisturbed)]
    assert torch.equal(*outputs)


def test_a_session_that_cannot_be_restored_is_damaged(hybrid: Stage) -> None:
    """Recurrent states have moved on, so it must not be used again."""
    cache = hybrid.new_cache()
    hybrid.run(StageInput(token_ids=IDS, cache=cache))
    with pytest.raises(StepFailed):
        hybrid.run(with_cache(cancel_after(2)[1], cache))
    assert cache.damaged
    with pytest.raises(ValueError, match="continues"):
        hybrid.run(StageInput(token_ids=IDS, cache=cache, past_len=4))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried 1 TB")],
)
def test_running_out_of_memory_fails_the_step_alone(
    first: Stage, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However torch says it; the stage goes on."""

    def explode(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(first._model, "forward", explode)
        with pytest.raises(StepFailed) as caught:
            first.run(StageInput(token_ids=IDS))
    assert caught.value.code == "out_of_memory"
    first.run(StageInput(token_ids=IDS))


def test_other_errors_pass_unchanged(first: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own bugs are not the step's fault."""

    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(first._model, "forward", explode)
    with pytest.raises(RuntimeError, match="a bug"):
        first.run(StageInput(token_ids=IDS))


def test_positions_beyond_a_learned_table_are_refused(tmp_path: Path) -> None:
    """GPT-2 has no position 64 here."""
    stage = load_stage(build_odd_model("gpt2", tmp_path), LayerRange(0, 2), device="cpu")
    cache = stage.new_cache()
    stage.run(StageInput(token_ids=torch.ones((1, POSITIONS_MAX), dtype=torch.long), cache=cache))
    with pytest.raises(StepFailed, match="positions") as caught:
        stage.run(StageInput(token_ids=IDS, cache=cache, past_len=POSITIONS_MAX))
    assert caught.value.code == "bad_step"
    assert cache.length == POSITIONS_MAX


def test_the_signature_decides_what_the_forward_is_given() -> None:
    """The library's names changed over time."""

    class Old:
        def forward(self, input_ids: object, past_key_values: object, num_logits_to_keep: int) -> None: ...

    class New:
        def forward(
            self, input_ids: object, position_ids: object, cache: object, use_cache: bool, logits_to_keep: int
        ) -> None: ...

    old, new = CallNames.of(Old), CallNames.of(New)  # type: ignore[arg-type]
    assert (old.cache, old.position_ids, old.logits_to_keep) == ("past_key_values", None, "num_logits_to_keep")
    assert (new.cache, new.position_ids, new.use_cache) == ("cache", "position_ids", "use_cache")
