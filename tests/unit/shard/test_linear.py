"""Packed linear layers compute what plain ones compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shard.linear import PackedLinear, can_pack, pack_linears, packable_weights
from shard.model_outline import ModelOutline

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16), reason="needs a torch and a CPU with oneDNN's bfloat16 kernels"
)


class TinyModel(nn.Module):
    """An embedding, a linear layer with bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.up = nn.Linear(48, 96)
        self.router = nn.Bilinear(4, 4, 4)
        self.head = nn.Linear(96, 64, bias=False)


def outline(*, tied: bool) -> ModelOutline:
    """How the tiny model names its parts."""
    return ModelOutline("layers", 1, "embed.weight", "head.weight", tied=tied)


def test_only_bfloat16_on_the_cpu_is_packed() -> None:
    """Float32 stays bit for bit what transformers computes; a GPU has its own kernels."""
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda", 0), torch.bfloat16)


def test_a_torch_without_the_kernel_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators have no public name, so they may go."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(CPU, torch.bfloat16)


def test_a_tied_head_stays_plain() -> None:
    """Its weight is the embedding's, which is looked up by rows."""
    assert packable_weights(TinyModel(), outline(tied=False)) == {"up.weight", "head.weight"}
    assert packable_weights(TinyModel(), outline(tied=True)) == {"up.weight"}


@needs_packing
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_equals_the_plain_one(rows: int, bias: bool) -> None:
    """Up to the order of summation."""
    plain = nn.Linear(96, 160, bias=bias).bfloat16()
    with torch.inference_mode():
        packed = PackedLinear(plain.weight, plain.bias)
        inputs = torch.randn(1, rows, 96).bfloat16()
        assert torch.allclose(packed(inputs), plain(inputs), atol=2e-2)
        assert torch.equal(packed.weight, plain.weight)
    assert (packed.in_features, packed.out_features) == (96, 160)


@needs_packing
def test_layers_are_replaced_largest_first() -> None:
    """Each weight is asked for once; what is not named stays."""
    model = TinyModel().bfloat16()
    weights = {"up.weight": model.up.weight.detach(), "head.weight": model.head.weight.detach()}
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return weights[name]

    pack_linears(model, set(weights), read)
    assert asked == ["head.weight", "up.weight"]
    assert isinstance(model.up, PackedLinear)
    assert isinstance(model.router, nn.Bilinear)
