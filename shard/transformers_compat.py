"""What releases of transformers within the allowed range have or name differently, found by looking for it.

Two more such places look at models and not at the library: `shard.call_names` reads a forward's signature,
`shard.layer_sharing` a config's fields.
"""

from __future__ import annotations

from typing import Any

from transformers import cache_utils
from transformers.configuration_utils import PreTrainedConfig


class _EmptyLayer:
    """As `DummyLayer` of transformers 5.23: a slot that holds nothing."""

    is_compileable = True
    supports_early_init = False

    def __init__(self) -> None:
        self.is_initialized = True
        self.keys = self.values = None


DummyLayer: Any = getattr(cache_utils, "DummyLayer", _EmptyLayer)
"""The slot of a layer that needs no cache."""
CACHELESS_KINDS = frozenset({"moe", "mlp"})
"""Kinds of layers without attention or state; before 5.23 their slots are unused states."""


def cacheless_layers(config: PreTrainedConfig) -> frozenset[int]:
    """Layers that run without a cache, by what the config calls them."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    return frozenset(i for i, kind in enumerate(kinds) if kind in CACHELESS_KINDS)
