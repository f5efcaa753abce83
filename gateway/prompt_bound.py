"""How few tokens a text can make, told from its size alone.

A prompt of megabytes against a window of thousands of tokens is refused before seconds are spent on tokenizing
it, but only where the bound is certain: each token covers at most as many bytes as the longest one spells. That
holds for byte-level BPE and BPE with byte fallback, whose every byte ends up in some token. It does not where
something may swallow text without bound (an unknown-word token, a stripping normalizer or added token, a splitter
that removes): there nothing is known, and such prompts are tokenized whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import pre_tokenizers

NFC_SHRINKS_BY_MAX = 4
"""Composing makes UTF-8 at most 3.5 times shorter (U+1FBE U+0308 U+0301 become U+0390)."""

State = Mapping[str, Any]


def bytes_per_token_max(tokenizer: State, *, is_ascii: bool) -> int | None:
    """The most bytes of text that one token stands for; None where no such number is known.

    Args:
        tokenizer: A decoded ``tokenizer.json``.
        is_ascii: Whether the text holds ASCII alone, which no normalizer that is known here shortens.
    """
    added = tokenizer.get("added_tokens") or []
    if tokenizer.get("truncation") or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    splitters = list(_flat(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_flat(tokenizer.get("normalizer"), "normalizers"))
    if not all(map(_keeps_all, splitters)) or not all(map(_shortens_nothing, normalizers)):
        return None
    is_byte_level = any(splitter["type"] == "ByteLevel" for splitter in splitters)
    longest = _longest_token(tokenizer["model"], is_byte_level=is_byte_level)
    if longest is None:
        return None
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    composes = any(normalizer["type"] == "NFC" for normalizer in normalizers)
    return longest * (NFC_SHRINKS_BY_MAX if composes and not is_ascii else 1)


def _longest_token(model: State, *, is_byte_level: bool) -> int | None:
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not vocab or model.get("continuing_subword_prefix"):
        return None
    if is_byte_level:
        # Each character of a byte-level token stands for one byte.
        return max(map(len, vocab)) if _holds_all(vocab, pre_tokenizers.ByteLevel.alphabet()) else None
    if model.get("byte_fallback") and _holds_all(vocab, (f"<0x{byte:02X}>" for byte in range(256))):
        return max(len(token.encode()) for token in vocab)
    return None


def _holds_all(vocab: Mapping[str, int], tokens: Any) -> bool:
    return all(token in vocab for token in tokens)


def _keeps_all(splitter: State) -> bool:
    match splitter["type"]:
        case "ByteLevel" | "Digits" | "Metaspace":
            return True
        case "Split" | "Punctuation":
            return bool(splitter["behavior"] != "Removed")
        case _:
            return False


def _shortens_nothing(normalizer: State) -> bool:
    match normalizer["type"]:
        case "NFC" | "Prepend":
            return True
        case "Replace":
            replaced = normalizer["pattern"].get("String")
            return replaced is not None and len(normalizer["content"].encode()) >= len(replaced.encode())
        case _:
            return False


def _flat(part: State | None, members: str) -> Iterator[State]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for member in part[members]:
        yield from _flat(member, members)


def tokens_min(text: str, per_token: Callable[[bool], int | None]) -> int:
    """At least so many tokens the text makes; 0 where nothing is known.

    Args:
        text: As it will be tokenized.
        per_token: `bytes_per_token_max` of the tokenizer, by whether the text is ASCII.
    """
    is_ascii = text.isascii()
    most = per_token(is_ascii)
    if most is None:
        return 0
    size = len(text) if is_ascii else len(text.encode("utf-8", "replace"))
    return -(-size // most)
