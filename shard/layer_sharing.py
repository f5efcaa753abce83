"""What layers share behind the model's back, as configs of transformers name it."""

from __future__ import annotations

from transformers.configuration_utils import PreTrainedConfig


def shared_sources(config: PreTrainedConfig) -> dict[int, int]:
    """Layer → the earlier layer whose keys and values it uses instead of its own.

    A config that shares them has `kv_sharing_modes`, one for each layer: ``reuse`` uses those of the last layer of the
    same kind (`layer_types`) that is not itself ``reuse``. Older releases of transformers say `num_kv_shared_layers`
    alone, which are the last ones.
    """
    modes = getattr(config, "kv_sharing_modes", None) or _modes_by_count(config)
    if not any(mode == "reuse" for mode in modes):
        return {}
    kinds = config.layer_types
    latest: dict[object, int] = {}
    sources: dict[int, int] = {}
    for i, (mode, kind) in enumerate(zip(modes, kinds, strict=True)):
        if mode != "reuse":
            latest[kind] = i
        elif kind in latest:
            sources[i] = latest[kind]
    return sources


def _modes_by_count(config: PreTrainedConfig) -> list[str]:
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return ["own"] * (config.num_hidden_layers - shared) + ["reuse"] * shared


def layers_that_ignore(config: PreTrainedConfig) -> frozenset[int]:
    """Layers that are given what the layer before found out and find it out anew.

    In models with an indexer, `indexer_types` says of each layer whether it uses the positions that the layer before
    has chosen (``shared``) or chooses itself (``full``).
    """
    kinds = getattr(config, "indexer_types", None) or []
    return frozenset(i for i, kind in enumerate(kinds) if kind == "full")
