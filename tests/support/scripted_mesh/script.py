"""The script's format, checked; `tests.support.scripted_mesh` describes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shared.errors import CACHE_MISS_REASONS

HOPS_MAX = 8
REPLICAS_MAX = 4
STALL_S = 600.0
"""Longer than any client or deadline waits."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Kind = Literal["miss", "error", "drop_link", "crash", "stall"]


class ScriptError(Exception):
    """The script is not as documented; the message names the place."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a script: unknown fields are mistakes."""


class Match(_Part):
    """Which prompts a rule answers."""

    contains: str | None = None
    regex: str | None = None
    any: bool = False

    def __post_init__(self) -> None:
        if (self.contains is not None) + (self.regex is not None) + self.any != 1:
            raise ValueError("needs exactly one of contains, regex and any")
        try:
            re.compile(self.regex or "")
        except re.error as error:
            raise ValueError(f"regex: {error}") from error

    def fits(self, prompt: str) -> bool:
        """Whether the rendered prompt is one of them."""
        if self.contains is not None:
            return self.contains in prompt
        return self.any or re.search(self.regex or "", prompt, re.DOTALL) is not None


class Answer(_Part):
    """One answer."""

    text: str | None = None
    tokens: tuple[Count, ...] | None = None
    pieces: tuple[str, ...] | None = None
    split: Literal["model", "character", "byte"] = "model"
    end: bool = True
    logprobs: tuple[float | Literal["-inf"], ...] = ()

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.text, self.tokens, self.pieces)) != 1:
            raise ValueError("needs exactly one of text, tokens and pieces")
        if not self.end and not (self.text or self.tokens or any(self.pieces or ())):
            raise ValueError("an answer without an end needs a token")


class Fault(_Part):
    """Something that goes wrong."""

    at: Count
    kind: Kind
    hop: Literal["first", "middle", "last"] | Count = "last"
    times: Count = 1
    reason: str = ""
    for_s: Seconds | None = None

    def __post_init__(self) -> None:
        if self.kind == "miss" and self.miss_reason not in CACHE_MISS_REASONS:
            raise ValueError(f"reason of a miss must be one of {', '.join(CACHE_MISS_REASONS)}")

    @property
    def miss_reason(self) -> str:
        """Of a miss."""
        return self.reason or "evicted"

    def hop_index(self, hops: int) -> int:
        """The hop it happens at, of so many."""
        return {"first": 0, "middle": hops // 2, "last": hops - 1}.get(str(self.hop), self.hop)  # type: ignore[return-value]


class Rule(_Part):
    """How some prompts are answered."""

    match: Match
    answers: Annotated[tuple[str | Answer, ...], msgspec.Meta(min_length=1)]
    delay_s: Seconds = 0.0
    first_delay_s: Seconds = 0.0
    faults: tuple[Fault, ...] = ()

    def answer(self, turn: int) -> Answer:
        """The answer whose turn it is."""
        chosen = self.answers[turn % len(self.answers)]
        return Answer(text=chosen) if isinstance(chosen, str) else chosen


class ModelPart(_Part):
    """The model that is made up."""

    name: str = "scripted"
    context_len: Annotated[int, msgspec.Meta(ge=8)] = 4096
    chat_template: str | None = None
    end_tokens: tuple[str, ...] = ("<|im_end|>",)
    bos: bool = False


class MeshPart(_Part):
    """The nodes."""

    hops: Annotated[int, msgspec.Meta(ge=1, le=HOPS_MAX)] = 3
    replicas: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)] = 1
    sessions: Annotated[int, msgspec.Meta(ge=1)] = 256


class Script(_Part):
    """A whole script."""

    version: Literal[1]
    rules: tuple[Rule, ...]
    model: ModelPart = ModelPart()
    mesh: MeshPart = MeshPart()
    gateway: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for rule in self.rules:
            for fault in rule.faults:
                if not fault.hop_index(self.mesh.hops) < self.mesh.hops:
                    raise ValueError(f"hop {fault.hop} of a fault is beyond the {self.mesh.hops} hops of the mesh")


def read_script(source: Path | dict[str, Any]) -> Script:
    """Read a script from a file, or from what such a file holds.

    Raises:
        ScriptError: It is not as documented.
        OSError: The file cannot be read.
    """
    try:
        if isinstance(source, Path):
            return msgspec.json.decode(source.read_bytes(), type=Script)
        return msgspec.convert(source, type=Script)
    except msgspec.MsgspecError as error:
        raise ScriptError(str(error)) from error
