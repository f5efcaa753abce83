"""What a stage finds out at load about layers that are not like the others; each then gives the whole's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from shard.loader import load_stage
from shard.stage import Stage, StageInput
from shared.errors import LoadFailed, StepFailed
from shared.layers import LayerRange
from tests.support.odd_models import VOCAB_SIZE, build_odd_model

CUTS = {"gemma3n": 2}
STEPS = (9, 5, 1, 1, 3)
TOLERANCE = 1e-4


def build_and_cut(kind: str, folder: Path) -> list[Stage]:
    """The model of this kind in two stages."""
    build_odd_model(kind, folder)
    num_layers = 6 if kind == "gemma3n" else 4
    cut = CUTS.get(kind, 1)
    return [load_stage(folder, LayerRange(*bounds), device="cpu") for bounds in ((0, cut), (cut, num_layers))]


def run_steps(stages: list[Stage], token_ids: torch.Tensor, *, cached: bool) -> list[torch.Tensor]:
    """Logits after each step; stateless steps bring all positions so far. Ids travel to every hop."""
    caches = [stage.new_cache() if cached else None for stage in stages]
    logits, length = [], 0
    for new_len in STEPS:
        passed_on: torch.Tensor | None = None
        start = length if cached else 0
        for stage, cache in zip(stages, caches, strict=True):
            ids = token_ids[:, start : length + new_len]
            passed_on = stage.run(StageInput(token_ids=ids, hidden_states=passed_on, cache=cache, past_len=start))
        assert passed_on is not None
        logits.append(passed_on)
        length += new_len
    return logits


@pytest.mark.parametrize("kind", ["gpt2", "falcon", "openai-gpt", "recurrent_gemma", "jamba", "gemma3n"])
def test_an_odd_model_gives_the_wholes_logits(kind: str, tmp_path: Path) -> None:
    """Cut in two, cached where its layers allow it, with chunks of several positions."""
    with capture_logs():
        stages = build_and_cut(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    token_ids = torch.randint(3, VOCAB_SIZE, (1, sum(STEPS)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(token_ids).logits[0]
    cached = all(stage.supports_kv_cache for stage in stages)
    length = 0
    for new_len, logits in zip(STEPS, run_steps(stages, token_ids, cached=cached), strict=True):
        length += new_len
        assert float((logits - whole[length - 1]).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "words"), [("openai-gpt", "takes no cache"), ("recurrent_gemma", "accepts a cache and does not use it")]
)
def test_layers_that_reject_a_cache_degrade_once(kind: str, words: str, tmp_path: Path) -> None:
    """The stage says so and why, and the log says it once per load."""
    build_odd_model(kind, tmp_path)
    with capture_logs() as logs:
        stage = load_stage(tmp_path, LayerRange(0, 4), device="cpu")
        for _ in range(3):
            stage.run(StageInput(token_ids=torch.tensor([[3, 4]])))
    assert not stage.supports_kv_cache
    assert words in (stage.no_cache_reason or "")
    assert stage.kv_bytes_per_token == 0
    warnings = [entry for entry in logs if entry["event"] == "stage.cache_unsupported"]
    assert len(warnings) == 1
    assert words in warnings[0]["reason"]


def test_layers_that_cannot_continue_in_chunks_go_one_by_one(tmp_path: Path) -> None:
    """Found by comparing, and only where a range holds such a layer."""
    build_odd_model("jamba", tmp_path)
    state_space = load_stage(tmp_path, LayerRange(0, 1), device="cpu")
    attention = load_stage(tmp_path, LayerRange(1, 2), device="cpu")
    assert not state_space.continues_in_chunks
    assert attention.continues_in_chunks


def test_one_by_one_gives_the_positions_asked_for(tmp_path: Path) -> None:
    """The same outputs as single steps, joined."""
    build_odd_model("jamba", tmp_path)
    stages = [load_stage(tmp_path, LayerRange(*bounds), device="cpu") for bounds in ((0, 2), (2, 4))]
    caches = [stage.new_cache() for stage in stages]
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = stages[0].run(StageInput(token_ids=ids, cache=caches[0]))
    stages[1].run(StageInput(hidden_states=hidden, cache=caches[1], output_len=0))
    chunk = stages[0].run(StageInput(token_ids=ids, cache=caches[0], past_len=4, output_len=3))
    assert chunk.shape == (1, 3, 32)
    assert caches[0].length == 8
    skipped = stages[1].run(StageInput(hidden_states=chunk, cache=caches[1], past_len=4, output_len=0))
    assert skipped.shape == (0,)
    logits = stages[1].run(StageInput(hidden_states=chunk[:, :2], cache=caches[1], past_len=7))
    assert logits.shape == (VOCAB_SIZE,)


def test_several_residual_streams_cross_a_boundary(tmp_path: Path) -> None:
    """Four streams in front: the positions are at axis 2, and all streams travel."""
    first, second = build_and_cut("gemma3n", tmp_path)
    assert (first.output_axis, second.input_axis) == (2, 2)
    output = first.run(StageInput(token_ids=torch.tensor([[3, 4, 5]]), output_len=2))
    assert output.shape == (4, 1, 2, 32)


def test_a_range_that_needs_ids_says_so(tmp_path: Path) -> None:
    """The layers of some models look at the token ids again: a later range refuses a step without them."""
    first, second = build_and_cut("gemma3n", tmp_path)
    assert (first.needs_token_ids, second.needs_token_ids) == (False, True)
    hidden = first.run(StageInput(token_ids=torch.tensor([[3, 4, 5]])))
    with pytest.raises(StepFailed, match="every layer range of this model needs token_ids"):
        second.run(StageInput(hidden_states=hidden))


def test_a_model_that_cannot_run_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, at load."""
    build_odd_model("gpt2", tmp_path)

    def explode(*_: object, **__: object) -> None:
        raise TypeError("layers of a kind nobody knows")

    monkeypatch.setattr("transformers.models.gpt2.modeling_gpt2.GPT2Block.forward", explode)
    with pytest.raises(LoadFailed, match="layers of a kind nobody knows") as caught:
        load_stage(tmp_path, LayerRange(1, 3), device="cpu")
    assert caught.value.code == "model_unsupported"
