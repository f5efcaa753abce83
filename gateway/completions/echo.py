"""A prompt as an answer repeats it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gateway.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call.

    Args:
        ids: Its tokens.
        text: What an echo shows; empty where none was asked for.
        offsets: Where each token begins in `text`; empty where they are not needed.
    """

    ids: tuple[int, ...]
    text: str = ""
    offsets: tuple[int, ...] = ()


def echoed_prompt(ids: tuple[int, ...], tokenizer: ChatTokenizer, *, with_offsets: bool) -> Prompt:
    """A prompt with its decoded text, special tokens skipped."""
    text = tokenizer.decode(ids)
    return Prompt(ids, text, _offsets(ids, text, tokenizer) if with_offsets else ())


def _offsets(ids: Sequence[int], text: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """A token begins after all whole characters that the tokens before it make."""
    detokenizer = tokenizer.detokenizer(())
    pieces = [detokenizer.push(token_id) for token_id in ids]
    # Some decoders strip the space with which the first word of a text begins.
    stripped = 1 if "".join(pieces).startswith(" ") and not text.startswith(" ") else 0
    ends = accumulate(map(len, pieces), initial=0)
    return tuple(max(0, end - stripped) for end, _ in zip(ends, ids, strict=False))
