"""Files that model tests need: tiny GGUF files, wheels that hold pieces of a file, catalogue entries for them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from shared.models.catalogue import CatalogueEntry, HubFile, Source, WheelPart, WheelParts

_NORMAL, _CONTROL = 1, 3


def write_gguf(folder: Path, path: Path, *, leave_out: str | None = None) -> Path:
    """Write the tiny `qwen2` model of a Hugging Face folder as a float32 GGUF, the way llama.cpp names things.

    Args:
        folder: Made by `build_tiny_model("qwen2", …)`.
        path: Where to write.
        leave_out: A GGUF tensor name to forget.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, folder)
    for name, array in load_file(folder / "model.safetensors").items():
        gguf_name = _gguf_name(name)
        if gguf_name != leave_out:
            writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    special = {entry["content"] for entry in tokenizer["added_tokens"] if entry["special"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_pad_token_id(vocab["<|endoftext|>"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, *rest = name.split(".")
    part = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }[".".join(rest[:-1])]
    return f"blk.{layer}.{part}.{rest[-1]}"


def wheel(project: str, member: str, content: bytes) -> tuple[str, bytes]:
    """A wheel's file name and bytes: one data file and the least metadata that pip accepts."""
    stem = f"{project.replace('-', '_')}-1.0"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def wheels_of(content: bytes, parts: int) -> tuple[dict[str, bytes], WheelParts]:
    """The content cut into wheels, and the source that names them."""
    size = -(-len(content) // parts)
    members = [f"tiny_part{index}/data/part{index:02}.bin" for index in range(1, parts + 1)]
    wheels = dict(
        wheel(f"tiny-part{index}", members[index - 1], content[(index - 1) * size : index * size])
        for index in range(1, parts + 1)
    )
    source = WheelParts(tuple(WheelPart(f"tiny-part{index}==1.0", members[index - 1]) for index in range(1, parts + 1)))
    return wheels, source


def entry_of(content: bytes, *sources: Source, **changes: Any) -> CatalogueEntry:
    """A catalogue entry for a file of this content."""
    values = {
        "name": "tiny",
        "aliases": ("small",),
        "file": "tiny-q8.gguf",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "converted_bytes": len(content),
        "sampling": (("temperature", 0.6), ("top_p", 0.9)),
        "licence": "Apache-2.0",
        "sources": sources,
    }
    return CatalogueEntry(**{**values, **changes})


HUB_FILE = HubFile("org/tiny-GGUF", "tiny-q8.gguf")
