"""How the served model's answers look: which parser reads one, and what a grammar must leave room for."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.answer import mint_call_id
from gateway.answer_grammar import AnswerShape, ReasoningMarkers
from gateway.call_formats import call_format
from gateway.chat_request import ToolsAsked
from gateway.grammar_writer import TokenId
from gateway.parsing.choice import FamilyChoice
from gateway.parsing.families import FAMILIES, create_parser
from gateway.parsing.parser import OutputParser

SHORT_ID_CHARS = 9
NO_FAMILY = FamilyChoice(None, None)
_HARMONY_REASONING = ReasoningMarkers(
    opener=("<|channel|>", "analysis", "<|message|>"), closer="<|end|>", after=("<|start|>", "assistant")
)
_HARMONY_CONTENT = ("<|channel|>", "final", "<|message|>")


OwnParser = Callable[[str, Sequence[Mapping[str, Any]]], OutputParser]
"""Makes the parser that a tokenizer brings, of the prompt's end and the tools."""


def answer_parser(
    families: FamilyChoice, tools: ToolsAsked, prompt_tail: str, own_parser: OwnParser | None = None
) -> OutputParser:
    """A fresh parser for one answer. Where no tool may be called, what looks like a call stays content.

    Args:
        families: The model's.
        tools: Those that it may call.
        prompt_tail: The end of the rendered prompt, which may have opened the reasoning.
        own_parser: The tokenizer's own, which reads for a model of no known family.
    """
    definitions = [tool.definition for tool in tools.tools]
    if own_parser is not None and families == NO_FAMILY and tools.mode != "none":
        return own_parser(prompt_tail, definitions)
    return create_parser(
        tool_family=None if tools.mode == "none" else families.tools,
        reasoning_family=families.reasoning,
        tools=definitions,
        prompt_tail=prompt_tail,
    )


def call_id_minter(families: FamilyChoice) -> Callable[[], str]:
    """Makes ids for calls whose format has none; Mistral's templates take back none but their own kind."""
    return _mint_short_id if families.tools == "mistral" else mint_call_id


def _mint_short_id() -> str:
    return secrets.token_hex(SHORT_ID_CHARS)[:SHORT_ID_CHARS]


def answer_shape(families: FamilyChoice, token_id: TokenId, prompt_tail: str) -> AnswerShape:
    """What a grammar must know to be one of this model's answers to this prompt.

    Args:
        families: The model's.
        token_id: Of its vocabulary.
        prompt_tail: The end of the rendered prompt.
    """
    calls = call_format(families.tools, token_id)
    if families.reasoning == "harmony":
        return AnswerShape(token_id=token_id, calls=calls, reasoning=_HARMONY_REASONING, content_lead=_HARMONY_CONTENT)
    names = [name for name in families if name is not None]
    return AnswerShape(
        token_id=token_id,
        calls=calls,
        reasoning=_reasoning_markers(families.reasoning, prompt_tail),
        takes_formats=all(FAMILIES[name].create_whole_parser is None for name in names),
    )


def _reasoning_markers(family: str | None, prompt_tail: str) -> ReasoningMarkers | None:
    """None where there is no reasoning, or where the prompt has closed it, as templates do that switch it off."""
    form = FAMILIES[family].reasoning if family is not None else None
    tail = prompt_tail.rstrip()
    if form is None or tail.endswith(form.closer):
        return None
    return ReasoningMarkers(opener=(form.opener,), closer=form.closer, is_open=tail.endswith(form.opener.rstrip()))
