"""A model folder for tests of fetching: real safetensors of about two megabytes, in two files, that nobody computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from shared.models.spans import Span
from shared.models.tensors import LENGTH_BYTES, TensorEntry, parse_header

NUM_LAYERS = 8
MATRIX_SHAPE = (64, 256)
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def numpy_model(seed: int = 0) -> dict[str, bytes]:
    """Content by file name; the first file has the first half of the layers. `seed` changes weights alone."""
    random = np.random.default_rng(seed)

    def matrix() -> np.ndarray:
        return random.standard_normal(MATRIX_SHAPE).astype(np.float32)

    tensors: tuple[dict[str, np.ndarray], ...] = ({}, {})
    for layer in range(NUM_LAYERS):
        for part in ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj"):
            tensors[layer * 2 // NUM_LAYERS][f"model.layers.{layer}.{part}.weight"] = matrix()
    tensors[0]["model.embed_tokens.weight"] = matrix()
    tensors[1]["lm_head.weight"] = matrix()
    tensors[1]["model.norm.weight"] = np.ones(MATRIX_SHAPE[0], dtype=np.float32)
    weight_map = {name: file for file, held in zip(FILES, tensors, strict=True) for name in held}
    config = {"model_type": "llama", "num_hidden_layers": NUM_LAYERS, "hidden_size": 64, "vocab_size": 256}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": json.dumps({"seed": "any"}).encode(),
        "generation_config.json": b"{}",
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        **{file: save(held) for file, held in zip(FILES, tensors, strict=True)},
    }


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """The folder with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def entries_of(files: dict[str, bytes]) -> list[TensorEntry]:
    """Every tensor of every safetensors file."""
    entries: list[TensorEntry] = []
    for name, content in files.items():
        if name.endswith(".safetensors"):
            entries += parse_header(content[LENGTH_BYTES : header_end(content)], name, len(content))
    return entries


def header_end(content: bytes) -> int:
    """Where a safetensors file's tensors begin."""
    return LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")


def layer_spans(files: dict[str, bytes], *layers: int) -> dict[str, list[Span]]:
    """The bytes of some layers' tensors, by file."""
    spans: dict[str, list[Span]] = {}
    for entry in entries_of(files):
        if any(entry.name.startswith(f"model.layers.{layer}.") for layer in layers):
            spans.setdefault(entry.file, []).append(Span(entry.offset, entry.end))
    return spans
