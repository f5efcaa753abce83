"""Token ids to text, one at a time, without ever showing half a character.

Theory of operation: the text of an answer is what ``decode(prompt + answer)`` adds to ``decode(prompt)``,
special tokens skipped. Nearly every tokenizer of a causal language model decodes by joining bytes: each id
stands for a fixed byte string, and the text is the UTF-8 of them all. For those `ByteDetokenizer` looks the
bytes up and feeds an incremental UTF-8 decoder: constant cost per token, and a character appears when its
last byte has. `WindowDetokenizer` serves the remaining decoders by decoding a short window twice.

Bytes that cannot become a character turn into U+FFFD as soon as that is certain. A character that the end
of an answer cuts through is dropped, streaming or not. A run of byte tokens that is no valid UTF-8 is
replaced as Unicode recommends, where the tokenizers library replaces every byte of the run.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"
WINDOW_CONTEXT_TOKENS = 8
"""Tokens before the new ones that a windowed decode sees, so that spaces between words come out right."""
WINDOW_HELD_TOKENS_MAX = 4
"""A character has at most four bytes: a text that still ends in U+FFFD after four more tokens is not waiting."""


class Detokenizer(Protocol):
    """Turns one answer's token ids into text."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        ...


class ByteDetokenizer:
    """Joins the bytes that ids stand for.

    Args:
        piece: The bytes of an id; empty for special tokens and ids outside the vocabulary.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        return self._decode(self._piece(token_id))


class WindowDetokenizer:
    """Decodes a window of the last tokens with and without the new ones, and returns the difference.

    Args:
        decode: Ids to text, special tokens skipped.
        context_ids: The prompt, or its end.
    """

    def __init__(self, decode: Callable[[list[int]], str], context_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = self._last_shown(context_ids)
        self._shown = decode(self._ids)
        self._held_tokens = 0

    def _last_shown(self, ids: Sequence[int]) -> list[int]:
        """The last of these ids that are text: a window of special tokens alone would look like a text's start."""
        shown = (token_id for token_id in reversed(ids) if self._decode([token_id]))
        return list(islice(shown, WINDOW_CONTEXT_TOKENS))[::-1]

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._shown and not self._held_tokens:
            self._ids.pop()  # a special token: it must not push what is shown out of the window
            return ""
        if text.endswith(REPLACEMENT) and self._held_tokens < WINDOW_HELD_TOKENS_MAX:
            self._held_tokens += 1
            return ""
        shown_chars = len(self._shown)
        self._held_tokens = 0
        self._ids = self._ids[-WINDOW_CONTEXT_TOKENS:]
        self._shown = self._decode(self._ids)
        return text[shown_chars:]


class PieceTable:
    """The bytes of each id, looked up once; never larger than the vocabulary.

    Args:
        token_of: The vocabulary; None for ids outside it.
        piece: The bytes of a token.
        special: The bytes of special tokens by id, empty where one is not shown.
    """

    def __init__(
        self, token_of: Callable[[int], str | None], piece: Callable[[str], bytes], special: Mapping[int, bytes]
    ) -> None:
        self._token_of = token_of
        self._piece = piece
        self._known: dict[int, bytes] = dict(special)

    def __call__(self, token_id: int) -> bytes:
        """The bytes of an id; empty for special ids that are not shown and those outside the vocabulary."""
        piece = self._known.get(token_id)
        if piece is None:
            token = self._token_of(token_id)
            if token is None:
                return b""
            piece = self._known[token_id] = self._piece(token)
        return piece


# --- what a token's bytes are -------------------------------------------------------------------


def byte_level_piece(token: str) -> bytes:
    """The bytes of a token of a byte-level BPE (GPT-2 and its many heirs)."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()  # an added token that is written as text


def metaspace_piece(token: str) -> bytes:
    """The bytes of a SentencePiece token, ``<0xE4>`` being one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass  # a token that only looks like a byte is text
    return token.replace(METASPACE, " ").encode()


def piece_function(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes] | None:
    """How tokens become bytes under a tokenizer's decoder; None when it does more than join bytes.

    Args:
        decoder: The `decoder` of a ``tokenizer.json``.
    """
    steps = _flatten(decoder)
    kinds = {step["type"] for step in steps}
    if kinds and kinds <= {"ByteLevel", "Fuse"}:
        return byte_level_piece
    if kinds and kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"} and all(map(_is_metaspace, steps)):
        return metaspace_piece
    return None


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _is_metaspace(step: Mapping[str, Any]) -> bool:
    """Whether a decoding step does, past the start of a text, no more than `metaspace_piece`."""
    match step["type"]:
        case "Replace":
            return bool(step["pattern"] == {"String": METASPACE} and step["content"] == " ")
        case "Metaspace":
            return bool(step["replacement"] == METASPACE)
        case "Strip":
            return bool(step["content"] == " " and step["stop"] == 0)
        case _:
            return True


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
