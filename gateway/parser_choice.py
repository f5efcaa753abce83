"""Which parsers read a model's answers: what its chat template tells, unless whoever runs the gateway knows better."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import ResponseParser

from gateway.answer_shape import OwnParser
from gateway.parsing.choice import FamilyChoice
from gateway.parsing.families import FAMILIES
from gateway.parsing.parser import OutputParser
from gateway.parsing.response_template import ResponseTemplateParser

AUTO = "auto"
"""As the chat template tells."""
NONE = "none"
"""Everything stays content."""

TOOL_PARSERS: tuple[str, ...] = (
    AUTO,
    NONE,
    *(
        name
        for name, family in FAMILIES.items()
        if family.create_tool_parser is not None or family.create_whole_parser is not None
    ),
)
REASONING_PARSERS: tuple[str, ...] = (
    AUTO,
    NONE,
    *(
        name
        for name, family in FAMILIES.items()
        if family.reasoning is not None or family.create_whole_parser is not None
    ),
)


@dataclass(frozen=True, slots=True)
class ParserNames:
    """What was asked for.

    Args:
        tools: Of `TOOL_PARSERS`.
        reasoning: Of `REASONING_PARSERS`.
    """

    tools: str = AUTO
    reasoning: str = AUTO

    def choose(self, told: FamilyChoice) -> FamilyChoice:
        """The families to use, given those that the template tells of."""
        return FamilyChoice(_chosen(self.tools, told.tools), _chosen(self.reasoning, told.reasoning))


AS_TOLD = ParserNames()
"""Nothing was asked for."""


def _chosen(name: str, told: str | None) -> str | None:
    if name == AUTO:
        return told
    return None if name == NONE else name


def own_parser(tokenizer: PreTrainedTokenizerFast) -> OwnParser | None:
    """Makes parsers of the tokenizer's own response template; None where it has none."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return None
    text = json.dumps(template, ensure_ascii=False)
    added = tokenizer.added_tokens_decoder.values()
    special_tokens = frozenset(token.content for token in added if token.special and token.content in text)

    def create(prompt_tail: str, tools: Sequence[Mapping[str, Any]]) -> OutputParser:
        responses = ResponseParser(template, prefix=prompt_tail, tools=[dict(tool) for tool in tools] or None)
        return ResponseTemplateParser(responses, special_tokens)

    return create
