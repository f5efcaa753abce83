"""A Llama whose layers' outputs are scaled. Whoever imports it is told so by the file it leaves behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from .configuration_odd import OddConfig

if "MESHNET_TEST_CODE_RAN" in os.environ:
    Path(os.environ["MESHNET_TEST_CODE_RAN"]).touch()


class OddLayer(LlamaDecoderLayer):
    """A layer that damps what it passes on."""

    def __init__(self, config: OddConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scale = config.layer_scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Llama's, scaled."""
        return super().forward(*args, **kwargs) * self.scale


class OddModel(LlamaModel):
    """Its stack."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(OddLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


class OddForCausalLM(LlamaForCausalLM):
    """With its head."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.model = OddModel(config)
        self.post_init()
