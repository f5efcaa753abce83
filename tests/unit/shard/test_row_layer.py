"""Steps of one row on kernels of our own: to the bit what transformers' layers give, and only where they are those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from shard import layer_takeover
from shard.layer_code import reference_of
from shard.linear import native
from shard.linear.choice import KernelChoice
from shard.linear.rows import Bf16Rows, Int4Rows, Int8Rows
from shard.loader import load_stage
from shard.row_layer import Room, RowLayer
from shard.stage import Stage, StageInput
from shared.layers import LayerRange

pytestmark = pytest.mark.skipif(native.native_absence() is not None, reason="needs llvmlite, and what it compiles for")
SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
WINDOW = 8
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, biased, no groups": lambda: LlamaConfig(
        **SIZES | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    ),
    "mistral, sliding": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
}
KINDS = {"none": Bf16Rows, "int8": Int8Rows, "int4": Int4Rows}
CASES = [*((name, "none") for name in CONFIGS), ("qwen2", "int8"), ("qwen2", "int4")]
LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    """Loads a stage of a random model with our kernels, taken over or not."""

    def load_kind(config: PretrainedConfig, quantize: str = "none", *, taken_over: bool = True) -> Stage:
        folder = tmp_path / type(config).__name__
        if not folder.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for name, parameter in model.named_parameters():
                nn.init.normal_(parameter, float("norm" in name), 0.3 if parameter.dim() == 1 else 0.1)
            model.save_pretrained(folder)
        kernels = (KINDS[quantize], Int8Rows) if quantize != "none" else (Bf16Rows,)
        monkeypatch.setattr("shard.loader.choose_kernels", lambda *_: KernelChoice(kernels, "asked for"))
        original = layer_takeover.take_over_layers
        monkeypatch.setattr("shard.loader.take_over_layers", original if taken_over else lambda *_: 0)
        return load_stage(folder, LayerRange(0, 3), device="cpu", dtype="bfloat16", quantize=quantize)

    return load_kind


def taken_over(stage: Stage) -> int:
    """How many layers are."""
    owners = (vars(module).get("forward") for module in stage._model.modules())
    return sum(isinstance(getattr(forward, "__self__", None), RowLayer) for forward in owners)


def decode(stage: Stage, steps: int = WINDOW) -> torch.Tensor:
    """Logits of a prompt and of so many steps after it."""
    cache, rows = stage.new_cache(), []
    for i in range(steps + 1):
        ids = torch.arange(5)[None] if i == 0 else torch.tensor([[7 * i % 200]])
        rows.append(stage.run(StageInput(token_ids=ids, cache=cache, past_len=cache.length)))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "quantize"), [*((name, "none") for name in CONFIGS), ("qwen2", "int8"), ("qwen2", "int4")]
)
def test_logits_are_the_same_to_the_bit(load: Callable[..., Stage], name: str, quantize: str) -> None:
    """Over a cache, across a window's edge, whatever the weights are held in."""
    ours, theirs = (load(CONFIGS[name](), quantize, taken_over=taken) for taken in (True, False))
    assert (taken_over(ours), taken_over(theirs)) == (3, 0)
    assert torch.equal(decode(ours), decode(theirs))


def test_without_a_cache_a_row_goes_the_layers_own_way(load: Callable[..., Stage]) -> None:
    """As it does for several rows."""
    ours, theirs = (load(CONFIGS["qwen2"](), taken_over=taken) for taken in (True, False))
    item = StageInput(token_ids=torch.tensor([[3]]))
    assert torch.equal(ours.run(item), theirs.run(item))


def test_sessions_do_not_meet_in_what_layers_share(load: Callable[..., Stage]) -> None:
    """Steps of two sessions in turns give what they give alone."""
    stage = load(CONFIGS["llama"]())
    alone = decode(stage)
    caches = [stage.new_cache(), stage.new_cache()]
    for i in range(WINDOW):
        for shift, cache in enumerate(caches):
            ids = torch.arange(5)[None] + shift if i == 0 else torch.tensor([[(7 * i + shift) % 200]])
            logits = stage.run(StageInput(token_ids=ids, cache=cache, past_len=cache.length))
            assert shift or torch.equal(logits, alone[i])


def test_another_model_keeps_its_layers(load: Callable[..., Stage]) -> None:
    """Granite scales what its layers add: nearly Llama's code."""
    assert taken_over(load(GraniteConfig(**SIZES, residual_multiplier=0.5))) == 0


def test_float32_keeps_its_layers(load: Callable[..., Stage], tmp_path: Path) -> None:
    """The kernels are bfloat16's."""
    load(CONFIGS["llama"]())
    assert taken_over(load_stage(tmp_path / "LlamaConfig", LayerRange(0, 3), device="cpu", dtype="float32")) == 0


def test_layers_that_differ_all_the_same_are_left(load: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found wrong when both ways are compared is not used."""
    monkeypatch.setattr(Room, "table", lambda *_: torch.zeros(2**16, dtype=torch.bfloat16))
    assert taken_over(load(CONFIGS["llama"]())) == 0


def llama_layer() -> LlamaDecoderLayer:
    """One that is Llama's."""
    config = LlamaConfig(**SIZES)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return LlamaDecoderLayer(config, 0)


class OtherMLP(LlamaMLP):
    """One line is another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With the parts exchanged."""
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))  # type: ignore[no-any-return]


def test_a_layer_is_known_by_its_code() -> None:
    """Any part with other code, a hook, or a part more, and it is not."""
    found = reference_of(llama_layer())
    assert found is not None
    assert not found.norms_heads
    other_code, hooked, larger = llama_layer(), llama_layer(), llama_layer()
    other_code.mlp = OtherMLP(LlamaConfig(**SIZES))
    hooked.mlp.up_proj.register_forward_hook(lambda *_: None)
    larger.more = nn.Identity()
    assert [reference_of(layer) for layer in (other_code, hooked, larger)] == [None, None, None]


@pytest.mark.parametrize("size", [16, 31, 100, 128, 896, 8192, 18944, 140_001])
def test_norms_are_those_of_torch(size: int) -> None:
    """To the bit, also in place: sums go in torch's order."""
    norm = Qwen2RMSNorm(size).bfloat16()
    nn.init.normal_(norm.weight)
    inputs = torch.randn(3, size).bfloat16() * torch.tensor([[1e-3], [1.0], [300.0]]).bfloat16()
    expected = torch.cat([norm(row) for row in inputs.split(1)])
    outputs, scratch = inputs.clone(), torch.empty(size)
    at = (outputs.data_ptr(), norm.weight.data_ptr(), scratch.data_ptr(), outputs.data_ptr())
    native.native_kernels().norm_bf16(*at, 3, size, norm.variance_epsilon, LANES)
    assert torch.equal(outputs, expected)


def test_what_lies_between_is_that_of_torch() -> None:
    """Rotation, gate and sum, to the bit."""
    kernels = native.native_kernels()
    states, cos, sin = (torch.randn(1, heads, 1, 24).bfloat16() for heads in (5, 1, 1))
    expected, _ = apply_rotary_pos_emb(states, states, cos[0], sin[0])
    kernels.rotate_bf16(states.data_ptr(), cos.data_ptr(), sin.data_ptr(), 5, 12)
    assert torch.equal(states, expected)
    gates, values = (torch.randn(1001).mul(4).bfloat16() for _ in range(2))
    expected, table = nn.functional.silu(gates) * values, Room().table(nn.SiLU())
    kernels.gate_bf16(gates.data_ptr(), table.data_ptr(), values.data_ptr(), 1001)
    assert torch.equal(values, expected)
    expected = values + gates
    kernels.add_bf16(values.data_ptr(), gates.data_ptr(), 1001)
    assert torch.equal(values, expected)
