"""The config of a model that transformers does not know."""

from __future__ import annotations

from transformers import LlamaConfig


class OddConfig(LlamaConfig):
    """A Llama whose layers' outputs are scaled."""

    model_type = "meshnet_odd"
    layer_scale: float = 0.5
