"""What a range is said to take, against what a loaded stage allocates: weights, caches, and a step's working space."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from shard import kv_layers, last_hop
from shard.loader import load_stage
from shard.stage import Stage, StageInput
from shared.layers import LayerRange
from shared.models import range_memory
from shared.models.measure import measure_model
from shared.models.range_memory import StepSizes
from tests.conftest import TinyModels
from tests.support.architectures import tiny_config
from tests.support.tiny_models import NUM_LAYERS, build_tokenizer

WHOLE = LayerRange(0, NUM_LAYERS)
LENGTHS = (40, 300)
"""Within what a slot has room for at first, and beyond it."""
CHUNK = 128
CONTEXT = 512
ALLOWED = 0.10


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Multi-head latent attention and a mixture of experts."""
    folder = tmp_path_factory.mktemp("deepseek_v3")
    build_tokenizer(folder)
    AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"), dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(params=["gemma3", "qwen3_next", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tiny_model: TinyModels, latent_model: Path) -> Path:
    """A sliding window, linear attention with experts, and latent attention."""
    return latent_model if request.param == "deepseek_v3" else tiny_model(request.param)


def prefill(stage: Stage, length: int) -> int:
    """Bytes of a session's cache after a prompt in chunks."""
    cache = stage.new_cache()
    while cache.length < length:
        ids = torch.ones((1, min(CHUNK, length - cache.length)), dtype=torch.long)
        stage.run(StageInput(token_ids=ids, cache=cache, past_len=cache.length))
    return cache.nbytes


def test_the_slots_grow_as_they_are_said_to():
    """The same figures, on a side that has torch and on one that has not."""
    assert range_memory.CAPACITY_MIN == kv_layers.CAPACITY_MIN
    assert range_memory.WINDOW_SLACK == kv_layers.WINDOW_SLACK
    assert range_memory.SCORE_LOGITS_BYTES == 2 * last_hop.SCORE_LOGITS_BYTES_MAX


@pytest.mark.parametrize("length", LENGTHS)
def test_a_session_takes_what_was_said(model: Path, length: int):
    """No less than its positions and states, no more than its slots may grow to."""
    facts = measure_model(model)
    memory = range_memory.range_memory(facts, WHOLE, StepSizes())
    held = prefill(load_stage(model, WHOLE, device="cpu"), length)
    most = sum(range_memory.slot_bytes(layer.slot, length) for layer in facts.layers)
    states = sum(layer.slot.state_bytes for layer in facts.layers)
    assert memory.kv_bytes_per_token * length + states <= held * (1 + ALLOWED)
    assert held <= most * (1 + ALLOWED)


def test_a_full_session_takes_its_positions_and_its_state(model: Path):
    """Where slots have no room to spare, what was said is what is allocated."""
    memory = range_memory.range_memory(measure_model(model), WHOLE, StepSizes())
    held = prefill(load_stage(model, WHOLE, device="cpu"), range_memory.CAPACITY_MIN)
    said = range_memory.CAPACITY_MIN * memory.kv_bytes_per_token + memory.state_bytes
    assert held == pytest.approx(said, rel=ALLOWED)


def wide_config() -> PretrainedConfig:
    """A llama of two layers, wide enough that its activations outweigh everything small."""
    config = tiny_config("llama")
    config.num_hidden_layers = 2
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 1024, 64
    config.vocab_size = 4096
    return config


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    folder = tmp_path_factory.mktemp("wide")
    build_tokenizer(folder)
    AutoModelForCausalLM.from_config(wide_config(), dtype=torch.float32).save_pretrained(folder)
    return folder


def peak_bytes(stage: Stage, past_len: int, new_len: int) -> int:
    """The most that torch has allocated at once during a step, but for what the cache keeps of it."""
    cache = stage.new_cache()
    if past_len:
        stage.run(StageInput(token_ids=torch.ones((1, past_len), dtype=torch.long), cache=cache))
    held_before = cache.nbytes
    ids = torch.ones((1, new_len), dtype=torch.long)
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        stage.run(StageInput(token_ids=ids, cache=cache, past_len=past_len))
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    held, highest = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest - (cache.nbytes - held_before)


def test_a_chunk_works_in_no_more_than_was_said(wide_model: Path):
    """Nor in less than half of it: a statement that is far too high would refuse ranges that fit."""
    layers = LayerRange(0, 2)
    stage = load_stage(wide_model, layers, device="cpu")
    said = range_memory.working_bytes(
        measure_model(wide_model), StepSizes(chunk_tokens=CHUNK, context_len=CONTEXT), has_head=False
    )
    taken = peak_bytes(stage, CONTEXT - CHUNK, CHUNK)
    assert said / 2 < taken <= said
