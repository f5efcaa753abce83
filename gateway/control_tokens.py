"""Control tokens that callers spell: marked before the chat template is rendered, and encoded as the text they are.

Newer releases of transformers have the same under private names that change; this needs only what a tokenizer shows.
Marks are two private-use characters around the token. A template may cut a text between them (``split``), so one
without its other half is dropped too, but still parts the text, so that what stands on either side cannot join.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

START, END = "\U000f0000", "\U000f0001"
MARKS = re.compile(f"[{START}{END}]")
LINE_BREAK = "\n"
"""What a piece is encoded after, since some tokenizers put a space before a text's beginning."""


class ControlTokens:
    """Those of one tokenizer: added tokens that are special, or that its chat template writes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.tokens = _find_tokens(tokenizer)
        any_token = "|".join(map(re.escape, self.tokens)) or "(?!)"  # which matches nothing
        self._token = re.compile(any_token)
        self._marked = re.compile(f"{START}({any_token}){END}|{MARKS.pattern}")

    def mark(self, value: Any) -> Any:
        """Put marks around control tokens in every string within JSON-like data, keys too; marks in it are dropped."""
        if isinstance(value, str):
            return self._token.sub(f"{START}\\g<0>{END}", MARKS.sub("", value))
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text with marks: tokens within marks as plain text, all else as usual.

        Raises:
            ValueError: The tokenizer makes the control token of its plain text, too.
        """
        ids: list[int] = []
        for i, piece in enumerate(self._marked.split(text)):  # text, token or None for a lone mark, text, …
            if piece and i % 2:
                ids += self._encode_spelled(piece)
            elif piece:
                ids += self._encode_after_break(piece) if i else self._encode(piece)
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_after_break(self, piece: str) -> list[int]:
        before = self._encode(LINE_BREAK)
        ids = self._encode(LINE_BREAK + piece)
        return ids[len(before) :] if ids[: len(before)] == before else self._encode(piece)

    def _encode_spelled(self, token: str) -> list[int]:
        before = self._encode_plain(LINE_BREAK)
        ids = self._encode_plain(LINE_BREAK + token)
        ids = ids[len(before) :] if ids[: len(before)] == before else self._encode_plain(token)
        if self._tokenizer.convert_tokens_to_ids(token) in ids:
            raise ValueError(f"the tokenizer makes {token!r} of its plain text")
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """By the backend's parts, without the added tokens that it would find first."""
        backend = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]


def _find_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Longest first, so that one goes before those that it contains."""
    template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
    tokens = {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (not token.content.isspace() and token.content in template)
    }
    return sorted(tokens, key=len, reverse=True)
