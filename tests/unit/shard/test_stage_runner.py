"""What a forward may raise, and what becomes of it. What it computes is tested with real stages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shard.runner import Pass, PassOutput
from shard.stage import StageInput
from shard.stage_runner import StageRunner
from shared.errors import MeshError, StepFailed
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step
from shared.tensor_spec import WireTensor
from tests.support.fake_runner import write_ids

VOCAB = 50


class FakeStage:
    """A whole model whose logits favour the last id; raises when told to."""

    layers = LayerRange(0, 2)
    num_layers = 2
    is_first = True
    is_last = True
    device = torch.device("cpu")
    dtype = torch.bfloat16
    supports_kv_cache = True
    kv_bytes_per_token = 8
    context_len = 100
    input_axis = 1
    vocab_size = VOCAB
    end_ids = ()

    def __init__(self) -> None:
        self.raises: list[Exception | None] = []

    def forward(self, batch: Sequence[StageInput]) -> list[torch.Tensor]:
        """One step at a time."""
        (item,) = batch
        error = self.raises.pop(0) if self.raises else None
        if error:
            raise error
        assert item.token_ids is not None
        return [torch.nn.functional.one_hot(item.token_ids[0, -1].long(), VOCAB).float()]


def runner_and_stage() -> tuple[StageRunner, FakeStage]:
    """A runner over a fake stage."""
    stage = FakeStage()
    return StageRunner(stage), stage  # type: ignore[arg-type]


def a_pass(ids: list[int]) -> Pass:
    """A stateless pass."""
    step = Step(session="s", step_index=0, new_len=len(ids), layers=LayerRange(0, 2), model="m")
    return Pass(step, {"token_ids": write_ids(ids)}, None, SamplingParams(temperature=0.0), lambda: False)


def test_each_pass_fails_alone() -> None:
    """One pass raises what it likes; those before and after it have their tokens."""
    runner, stage = runner_and_stage()
    stage.raises = [None, RuntimeError("mat1 and mat2 shapes"), StepFailed("out_of_memory", "none left"), None]
    outcomes = runner.run([a_pass([3]), a_pass([4]), a_pass([5]), a_pass([1, 6])])
    codes = [each.code if isinstance(each, MeshError) else each.token_ids for each in outcomes]
    assert codes == [(3,), "internal_error", "out_of_memory", (6,)]


def test_no_output_is_no_token() -> None:
    """A chunk that is not the last gives nothing."""
    runner, _ = runner_and_stage()
    each = a_pass([3])
    step = Step(session="s", step_index=0, layers=LayerRange(0, 2), model="m", output_len=0)
    assert runner.run([Pass(step, each.tensors, None, None, each.cancelled)]) == [PassOutput()]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "token_ids is missing"),
        ({"token_ids": write_ids([1])}, r"token_ids must have \[1, 2\], got shape \[1, 1\]"),
        ({"token_ids": write_ids([1, VOCAB])}, "token_ids must be from 0 to 49, got 1 to 50"),
        ({"token_ids": write_ids([-1, 1])}, "token_ids must be from 0 to 49"),
        ({"token_ids": WireTensor("f32", (1, 2), memoryview(bytes(8)))}, "token_ids must be one of i32, i64, got f32"),
    ],
)
def test_inputs_are_judged_by_name(tensors: dict[str, WireTensor], says: str) -> None:
    """What cannot be right is refused before anything is computed."""
    runner, _ = runner_and_stage()
    step = Step(session="s", step_index=0, new_len=2, layers=LayerRange(0, 2), model="m")
    with pytest.raises(StepFailed, match=says):
        runner.check(step, tensors)


def test_describes_itself_as_frames_do() -> None:
    """Element type and device have the names that travel."""
    runner, _ = runner_and_stage()
    assert (runner.dtype, runner.device, runner.returns_token_ids) == ("bf16", "cpu", True)
    assert runner.memory_free_bytes() > 0
