"""Which families a model is of, told by its chat template and the tokens its tokenizer adds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

_BAR = "\N{FULLWIDTH VERTICAL LINE}"

TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|start|>", "<|channel|>", "functions.")),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_dsml", (f"{_BAR}DSML{_BAR}",)),
    ("deepseek_v3", (f"<{_BAR}tool▁calls▁begin{_BAR}>",)),
    ("gemma4", ("<|tool_call>", "call:")),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm", ("<arg_key>", "<arg_value>")),
    ("qwen3_xml", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("command_r", ("<|START_ACTION|>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("hermes", ("<tool_call>",)),
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("tool_calls_list", ("<tool_calls>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
)
"""What must all stand in the template or among the tokens, the first family that fits. Rare signs come first, for
formats have been taken over with changes, and a template may show two of them."""

REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|start|>", "<|channel|>", "analysis")),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("seed_oss", ("<seed:think>",)),
    ("command_r", ("<|START_THINKING|>",)),
    ("mistral_think", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("think", ("</think>",)),
)
"""As `TOOL_SIGNS`, for reasoning."""


class FamilyChoice(NamedTuple):
    """The names of a model's families in `FAMILIES`, or none where it has no calls, or no reasoning."""

    tools: str | None
    reasoning: str | None


def choose_family(chat_template: str | Mapping[str, str] | None, added_tokens: Collection[str]) -> FamilyChoice:
    """Tell a model's families.

    Args:
        chat_template: The template, or several by name. Only a template that takes tools has calls.
        added_tokens: The tokenizer's added tokens, special or not.
    """
    templates = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""]
    text = "\n".join(templates)
    takes_tools = "tools" in text or "tool_calls" in text
    seen = "\n".join([text, *added_tokens])
    return FamilyChoice(
        tools=_first(TOOL_SIGNS, text) or _first(TOOL_SIGNS, seen) if takes_tools else None,
        reasoning=_first(REASONING_SIGNS, text) or _first(REASONING_SIGNS, seen) if text else None,
    )


def _first(signs: tuple[tuple[str, tuple[str, ...]], ...], text: str) -> str | None:
    return next((name for name, marks in signs if all(mark in text for mark in marks)), None)
