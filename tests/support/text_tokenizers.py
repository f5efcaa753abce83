"""Tokenizers of the two families, in ways that real ones differ, each in a folder that a gateway can load."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import CHAT_TEMPLATE, build_tokenizer

CONTEXT_LEN = 256


def write_configs(folder: Path, *, eos: int | list[int] = 2, **generation: object) -> Path:
    """What a gateway reads beside the tokenizer."""
    config = {"model_type": "qwen2", "num_hidden_layers": 2, "max_position_embeddings": CONTEXT_LEN}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def build_byte_level(folder: Path) -> Path:
    """The tiny models' byte-level BPE, with a visible added token beside the special ones."""
    build_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save_pretrained(folder)
    return write_configs(folder)


def build_metaspace(folder: Path) -> Path:
    """A SentencePiece-like BPE with byte fallback, as Llama 2, Mistral and Gemma have."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["\u2581", *"abcdehilortw.,!ö", "\u2581h", "\u2581w", "ll", "\u2581a"]
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: index for index, token in enumerate([*special, *bytes_, *words])}
    merges = [("\u2581", "h"), ("\u2581", "w"), ("l", "l"), ("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, folder)


def build_word_piece(folder: Path) -> Path:
    """A decoder that does more than join bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*special, "user", "mesh", "node", "##s", "##ed", "a", "!"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _save(tokenizer, folder)


def _save(tokenizer: Tokenizer, folder: Path) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    return write_configs(folder)


BUILDERS = {"byte_level": build_byte_level, "metaspace": build_metaspace, "word_piece": build_word_piece}
