"""What enters the head, and logits a few positions at a time, against transformers itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shard import last_hop
from shard.last_hop import finish, pool
from shard.loader import load_stage
from shard.runner import Pass, PassOutput
from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shard.tensor_io import to_torch, to_wire
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step
from shared.tensor_spec import WireTensor
from tests.conftest import TinyModels
from tests.support.odd_models import build_odd_model
from tests.support.tiny_models import KINDS, NUM_LAYERS

IDS = torch.arange(5, 25).unsqueeze(0)
NEW_LEN = IDS.shape[1]
HALF = NUM_LAYERS // 2


def reference(folder: Path, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' own final hidden states ``[T, H]`` and logits ``[T, V]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model.base_model(ids).last_hidden_state[0], model(ids).logits[0]


def whole(folder: Path, num_layers: int = NUM_LAYERS) -> Stage:
    """The model in one stage."""
    return load_stage(folder, LayerRange(0, num_layers), device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_head_inputs_and_logits_are_the_models_own(tiny_model: TinyModels, kind: str) -> None:
    """Whole, and of a range that gets hidden states; the plain step's logits to the last bit."""
    folder = tiny_model(kind)
    hidden_TH, logits_TV = reference(folder)  # noqa: N806
    stage = whole(folder)
    head_inputs = stage.run(StageInput(token_ids=IDS, head_inputs=True))
    torch.testing.assert_close(head_inputs, hidden_TH)
    torch.testing.assert_close(stage.run_head(head_inputs[3:9]), logits_TV[3:9])
    assert torch.equal(stage.run_head(head_inputs[-1:])[0], stage.run(StageInput(token_ids=IDS)))

    first, last = (
        load_stage(folder, layers, device="cpu", dtype="float32")
        for layers in (LayerRange(0, HALF), LayerRange(HALF, NUM_LAYERS))
    )
    passed_on = first.run(StageInput(token_ids=IDS))
    head_inputs = last.run(StageInput(hidden_states=passed_on, head_inputs=True, output_len=0))
    torch.testing.assert_close(head_inputs, hidden_TH)
    torch.testing.assert_close(last.run_head(head_inputs), logits_TV)


@pytest.mark.parametrize(
    ("kind", "num_layers"), [("gpt2", 4), ("falcon", 4), ("openai-gpt", 4), ("jamba", 4), ("gemma3n", 6)]
)
def test_odd_models_have_head_inputs_too(tmp_path: Path, kind: str, num_layers: int) -> None:
    """Layers that return tuples, no `logits_to_keep`, soft caps after the head, steps that are run one by one."""
    stage = whole(build_odd_model(kind, tmp_path), num_layers)
    _, logits_TV = reference(tmp_path)  # noqa: N806
    cache = stage.new_cache() if stage.supports_kv_cache else None
    if cache is not None:
        stage.run(StageInput(token_ids=IDS[:, :8], cache=cache))
    past_len = 8 if cache else 0
    item = StageInput(token_ids=IDS[:, past_len:], cache=cache, past_len=past_len, head_inputs=True, output_len=0)
    head_inputs = stage.run(item)
    assert head_inputs.shape[0] == NEW_LEN - past_len
    torch.testing.assert_close(stage.run_head(head_inputs), logits_TV[past_len:], rtol=1e-3, atol=1e-4)


def test_head_alone_leaves_the_layers_in_place(tiny_model: TinyModels) -> None:
    """The next step is computed as if nothing had been scored, and also after a failure."""
    stage = whole(tiny_model("qwen2"))
    expected = stage.run(StageInput(token_ids=IDS))
    head_inputs = stage.run(StageInput(token_ids=IDS, head_inputs=True))
    stage.run_head(head_inputs)
    with pytest.raises(RuntimeError):
        stage.run_head(head_inputs[:, :5])
    assert torch.equal(stage.run(StageInput(token_ids=IDS)), expected)


def a_pass(tensors: Mapping[str, WireTensor], sampling: SamplingParams | None = None, **fields: object) -> Pass:
    """A stateless step of all positions."""
    values: dict[str, object] = {"new_len": NEW_LEN, "layers": LayerRange(0, NUM_LAYERS), "model": "m", **fields}
    step = Step(session="s", step_index=0, **values)  # type: ignore[arg-type]
    return Pass(step, tensors, None, sampling, lambda: False)


def read(output: PassOutput, name: str) -> torch.Tensor:
    """A tensor of the answer."""
    return to_torch(output.tensors[name])


@pytest.mark.parametrize("kind", KINDS)
def test_scored_targets_are_the_log_softmax(tiny_model: TinyModels, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each target, in slices of three positions; -1 is left out."""
    folder = tiny_model(kind)
    stage = whole(folder)
    monkeypatch.setattr(last_hop, "SCORE_LOGITS_BYTES_MAX", 4 * stage.vocab_size * 3)
    seen: list[int] = []
    run_head = stage.run_head
    monkeypatch.setattr(stage, "run_head", lambda rows: seen.append(len(rows)) or run_head(rows))
    targets = torch.cat((IDS[0, 1:], torch.tensor([-1])))
    targets[4] = -1
    each = a_pass({"target_ids": to_wire(targets.int().unsqueeze(0))}, score=2, output_len=0)
    output = finish(stage, each, stage.run(StageInput(token_ids=IDS, head_inputs=True)))
    expected = torch.log_softmax(reference(folder)[1].double(), -1)
    positions = [i for i in range(NEW_LEN - 1) if i != 4]
    best = expected[positions].topk(2)
    assert max(seen) == 3
    assert sum(seen) == len(positions)
    assert output.token_ids is None
    assert read(output, "logprob_ids").shape == (len(positions), 3)
    assert read(output, "logprob_ids")[:, 0].tolist() == targets[positions].tolist()
    assert read(output, "logprob_ids")[:, 1:].tolist() == best.indices.tolist()
    np.testing.assert_allclose(read(output, "logprobs")[:, 0], expected[positions, targets[positions]], atol=1e-4)
    np.testing.assert_allclose(read(output, "logprobs")[:, 1:], best.values, atol=1e-4)


def test_scoring_nothing_gives_no_rows(tiny_model: TinyModels) -> None:
    """All targets left out is a step like any other: it may still draw."""
    stage = whole(tiny_model("qwen2"))
    targets = {"target_ids": to_wire(torch.full((1, NEW_LEN), -1, dtype=torch.int32))}
    each = a_pass(targets, SamplingParams(temperature=0.0), score=3)
    output = finish(stage, each, stage.run(StageInput(token_ids=IDS, head_inputs=True)))
    assert read(output, "logprobs").shape == read(output, "logprob_ids").shape == (0, 4)
    assert output.token_ids == (int(stage.run(StageInput(token_ids=IDS)).argmax()),)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_chunks_add_up(tiny_model: TinyModels, kind: str) -> None:
    """The mean's parts over any chunks sum to that of all positions; the last is the last."""
    folder = tiny_model(kind)
    hidden_TH, _ = reference(folder)  # noqa: N806
    stage = whole(folder)
    cache, parts = stage.new_cache(), []
    for ids in IDS.split([7, 12, 1], dim=1):
        item = StageInput(token_ids=ids, cache=cache, past_len=cache.length, head_inputs=True)
        parts.append(stage.run(item))
    torch.testing.assert_close(sum(pool(part, "mean") for part in parts), hidden_TH.sum(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pool(parts[-1], "last"), hidden_TH[-1], rtol=1e-3, atol=1e-3)
    output = finish(stage, a_pass({}, pool="last"), parts[-1])
    assert output.token_ids is None
    assert read(output, "embedding").tolist() == pool(parts[-1], "last").tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_cache_go_their_own_ways(tiny_model: TinyModels, kind: str) -> None:
    """Growing one in place never shows in the other, nor in what it gives."""
    stage = whole(tiny_model(kind))
    cache = stage.new_cache()
    stage.run(StageInput(token_ids=IDS, cache=cache))
    copy = cache.copy()
    assert copy.nbytes == cache.nbytes
    before = tensors_of(copy)
    followed = [follow(stage, cache, [30 + i]) for i in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(copy), before, strict=True))
    other = [follow(stage, copy, [60 + i]) for i in range(3)]
    for given, ids in ((followed, [30, 31, 32]), (other, [60, 61, 62])):
        unforked = stage.new_cache()
        stage.run(StageInput(token_ids=IDS, cache=unforked))
        expected = [follow(stage, unforked, [token]) for token in ids]
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def follow(stage: Stage, cache: StageCache, ids: list[int]) -> torch.Tensor:
    """The logits after these ids."""
    return stage.run(StageInput(token_ids=torch.tensor([ids]), cache=cache, past_len=cache.length))


def tensors_of(cache: StageCache) -> list[torch.Tensor]:
    """What the slots hold now, copied."""
    held = [value for slot in cache.slots.layers for value in vars(slot).values() if isinstance(value, torch.Tensor)]
    return [tensor.clone() for tensor in [*held, *cache.opaque_states()]]
