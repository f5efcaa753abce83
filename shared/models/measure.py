"""A model's facts for a planner, from its config and the headers of its weights: no weight is read, no torch needed.

Tensors are told apart by name and shape. Which numbered list is the decoder's is not in the config, so it is the one
that has every layer's number and the most bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from shared.models.errors import ModelUnavailable
from shared.models.facts import LayerFacts, ModelFacts
from shared.models.fingerprint import stored_tensors
from shared.models.folder import ModelConfig, read_config, read_json, text_config
from shared.models.quantized import quantized_bytes
from shared.models.slots import read_forbidden_cuts, read_slots
from shared.models.step_sizes import MASK_FLAG_BYTES, activation_items
from shared.models.stored import StoredFormat, Weight, join_all
from shared.models.stored_formats import read_stored_format
from shared.models.tensors import TensorEntry
from shared.options import QUANTIZE_NONE

ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What weights can be computed in."""
_STORED: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NUMBERED = re.compile(r"(?:^|\.)(\d+)\.")
_HEADS: Final = ("lm_head", "embed_out", "output", "head")
_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN_COUNTS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(slots=True)
class _Sorted:
    """Tensors by the part of the model they belong to."""

    layers: dict[int, list[Weight]]
    embedding: list[Weight] = field(default_factory=list)
    head: list[Weight] = field(default_factory=list)
    rest: list[Weight] = field(default_factory=list)


def measure_model(folder: Path, dtype: str = "auto", quantize: str = QUANTIZE_NONE) -> ModelFacts:
    """Read what a planner, and a node before it loads, needs of the model in a folder.

    Args:
        folder: With `config.json` and safetensors.
        dtype: What it will be computed in: a key of `ITEM_BYTES`, or ``auto`` for what most of it is stored in, or what
            its config names where it is stored quantized.
        quantize: As the node's flag. What a node keeps plain of what looks like a layer's matrix cannot be told from
            names alone, but for experts and a tied head: the node's own count is exact.

    Raises:
        ModelUnavailable: `not_a_model`, if its layers cannot be told from their names; `model_unsupported` and
            `weights_corrupt`, if it is stored quantized in a way that is not loaded.
    """
    return measure_variants(folder, [(dtype, quantize)])[0]


def measure_variants(folder: Path, kinds: Iterable[tuple[str, str]]) -> list[ModelFacts]:
    """As `measure_model`, for several element types and quantizations; the files are read once.

    Raises:
        ModelUnavailable: As `measure_model`.
    """
    config = read_config(folder)
    content = read_json(folder / "config.json")
    text, stored = text_config(content), read_stored_format(content)
    tensors = join_all(stored, stored_tensors(folder))
    parts = _sort(tensors, config.num_layers, config.vocab_size, config.hidden_size)
    if len(parts.layers) != config.num_layers:
        message = f"{folder}: its config names {config.num_layers} layers, and its weights no list of so many"
        raise ModelUnavailable("not_a_model", message, path=str(folder))
    own = _stored_dtype(stored, tensors)
    return [_facts(config, text, parts, own if dtype == "auto" else dtype, quantize) for dtype, quantize in kinds]


def _facts(config: ModelConfig, text: Mapping[str, Any], parts: _Sorted, dtype: str, quantize: str) -> ModelFacts:
    item_bytes = ITEM_BYTES[dtype]
    slots = read_slots(text, config.num_layers, item_bytes)
    chosen = _chosen_share(text)
    is_tied = not parts.head or text.get("tie_word_embeddings") is True
    embedding_bytes = _bytes_in_memory(parts.embedding, item_bytes, quantize)
    return ModelFacts(
        layers=tuple(
            LayerFacts(
                weight_bytes=_bytes_in_memory(parts.layers[index], item_bytes, quantize),
                active_bytes=_active_bytes(parts.layers[index], item_bytes, quantize, chosen),
                slot=slots[index],
            )
            for index in range(config.num_layers)
        ),
        embedding_bytes=embedding_bytes,
        head_bytes=embedding_bytes if is_tied else _bytes_in_memory(parts.head, item_bytes, quantize),
        tied_bytes=_bytes_in_memory(parts.embedding, item_bytes) if is_tied else 0,
        is_tied=is_tied,
        shared_bytes=_bytes_in_memory(parts.rest, item_bytes),
        hidden_bytes=config.hidden_size * item_bytes,
        forbidden_cuts=read_forbidden_cuts(text, config.num_layers),
        context_len=config.context_len,
        vocab_size=config.vocab_size,
        step_bytes_per_token=activation_items(text) * item_bytes,
        mask_bytes_per_pair=item_bytes + MASK_FLAG_BYTES,
        dtype=dtype,
        quantize=quantize,
    )


def _sort(tensors: list[Weight], num_layers: int, vocab_size: int, hidden_size: int) -> _Sorted:
    numbered: dict[str, dict[int, list[Weight]]] = defaultdict(lambda: defaultdict(list))
    outside = []
    for tensor in tensors:
        match = _NUMBERED.search(tensor.name)
        if match is None:
            outside.append(tensor)
        else:
            numbered[tensor.name[: match.start()]][int(match[1])].append(tensor)
    complete = [layers for layers in numbered.values() if all(index in layers for index in range(num_layers))]
    layers = max(complete, key=_stored_bytes, default={})
    parts = _Sorted({index: layers[index] for index in range(num_layers)} if layers else {})
    for tensor in outside:
        if tensor.shape != (vocab_size, hidden_size):
            parts.rest.append(tensor)
        elif tensor.name.removesuffix(".weight").rpartition(".")[2] in _HEADS:
            parts.head.append(tensor)
        else:
            parts.embedding.append(tensor)
    return parts


def _stored_bytes(layers: Mapping[int, list[Weight]]) -> int:
    return sum(tensor.nbytes for tensor in chain.from_iterable(layers.values()))


def _bytes_in_memory(tensors: Iterable[Weight], item_bytes: int, quantize: str = QUANTIZE_NONE) -> int:
    """Floats take what they are computed in or quantized to, others what they take in the file."""
    return sum(_tensor_bytes(tensor, item_bytes, quantize) for tensor in tensors)


def _tensor_bytes(tensor: Weight, item_bytes: int, quantize: str) -> int:
    if not tensor.is_float:
        return tensor.nbytes
    return quantized_bytes(tensor.shape, item_bytes, QUANTIZE_NONE if _is_expert(tensor) else quantize)


def _is_expert(tensor: Weight) -> bool:
    """Experts are stored one by one and computed as one tensor, which is not quantized."""
    return "experts" in tensor.name.split(".")


def _active_bytes(tensors: list[Weight], item_bytes: int, quantize: str, chosen_share: float) -> int:
    """What a decode step reads of a layer: of its experts only the chosen ones."""
    experts = _bytes_in_memory(filter(_is_expert, tensors), item_bytes, quantize)
    return round(_bytes_in_memory(tensors, item_bytes, quantize) - experts * (1 - chosen_share))


def _chosen_share(text: Mapping[str, Any]) -> float:
    experts = next((text[key] for key in _EXPERT_COUNTS if text.get(key)), 0)
    chosen = next((text[key] for key in _CHOSEN_COUNTS if text.get(key)), 0)
    return min(1.0, chosen / experts) if experts and chosen else 1.0


def _stored_dtype(stored: StoredFormat, tensors: Iterable[Weight]) -> str:
    """What the config of a quantized checkpoint names; else the element type of most bytes that are plain."""
    by_dtype: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if isinstance(tensor, TensorEntry) and tensor.dtype in _STORED:
            by_dtype[tensor.dtype] += tensor.nbytes
    return _STORED[stored.dtype or max(by_dtype, key=lambda dtype: by_dtype[dtype], default="F32")]
