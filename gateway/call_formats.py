"""How families of models write a tool call, as far as a grammar that makes them write one needs it.

In the families that are not here a call can be read (`gateway.parsing`) but not forced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.grammar_writer import MAYBE_NEWLINE

NAME = "{name}"
KEY = "{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFormat:
    """What stands around one argument, where a family writes each on its own; texts as in `CallFormat`.

    Args:
        before: Up to its value; `KEY` stands for the argument's name.
        end: After its value; the first text is what text values are read up to.
    """

    before: tuple[str, ...]
    end: tuple[str, ...]

    def before_value(self, key: str) -> tuple[str, ...]:
        """Up to the value of this argument."""
        return tuple(part.replace(KEY, key) for part in self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """What stands around calls and their arguments.

    The texts are sequences, of which each item is a token of the vocabulary as a whole, where it is one, or text.

    Args:
        opener: The marker before a call, or before all of them; empty where there is none.
        lead: Between the opener and the first call.
        before: Of a call, up to its arguments; `NAME` stands for the function's.
        after: Of a call, after its arguments.
        closer: After a call, or after all of them.
        separator: Between calls; None where only one can be forced.
        wraps_each: Whether each call has an opener and a closer of its own.
        parameter: How one argument is written; None where all are one JSON object.
    """

    opener: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    closer: tuple[str, ...] = ()
    separator: tuple[str, ...] | None = None
    wraps_each: bool = False
    parameter: ParameterFormat | None = None

    def before_call(self, name: str) -> tuple[str, ...]:
        """Up to the arguments of a call of this function."""
        return tuple(part.replace(NAME, name) for part in self.before)


def _json_list(opener: str, *closers: str) -> CallFormat:
    return CallFormat(
        opener=opener,
        lead=("[",),
        before=(f'{{"name": "{NAME}", "arguments": ',),
        after=("}",),
        closer=("]", *closers),
        separator=(", ",),
    )


_HERMES = CallFormat(
    opener="<tool_call>",
    before=(f'\n{{"name": "{NAME}", "arguments": ',),
    after=("}\n",),
    closer=("</tool_call>",),
    separator=("\n",),
    wraps_each=True,
)
_LLAMA = CallFormat(opener="", before=(f'{{"name": "{NAME}", "parameters": ',), after=("}",), separator=("; ",))
_COMMAND = CallFormat(
    opener="<|START_ACTION|>",
    lead=("[\n    ",),
    before=(f'{{"tool_name": "{NAME}", "parameters": ',),
    after=("}",),
    closer=("\n]", "<|END_ACTION|>"),
    separator=(",\n    ",),
)
_KIMI = CallFormat(
    opener="<|tool_calls_section_begin|>",
    before=("<|tool_call_begin|>", f"functions.{NAME}:0", "<|tool_call_argument_begin|>"),
    after=("<|tool_call_end|>",),
    closer=("<|tool_calls_section_end|>",),
)
_MISTRAL_TOKENS = CallFormat(opener="[TOOL_CALLS]", before=(NAME, "[ARGS]"), separator=(), wraps_each=True)

_HARMONY = CallFormat(
    opener="",
    before=("<|channel|>", f"commentary to=functions.{NAME} ", "<|constrain|>", "json", "<|message|>"),
)


def _function_xml(opener: str, closer: str) -> CallFormat:
    return CallFormat(
        opener=opener,
        before=(f"\n<function={NAME}>\n",),
        after=("</function>\n",),
        closer=(closer,),
        separator=("\n",),
        wraps_each=True,
        parameter=ParameterFormat(before=(f"<parameter={KEY}>\n",), end=("\n</parameter>\n",)),
    )


_GLM = CallFormat(
    opener="<tool_call>",
    before=(NAME, MAYBE_NEWLINE),
    closer=("</tool_call>",),
    separator=(MAYBE_NEWLINE,),
    wraps_each=True,
    parameter=ParameterFormat(
        before=("<arg_key>", KEY, "</arg_key>", MAYBE_NEWLINE, "<arg_value>"), end=("</arg_value>", MAYBE_NEWLINE)
    ),
)
_MINIMAX = CallFormat(
    opener="<minimax:tool_call>",
    lead=("\n",),
    before=(f'<invoke name="{NAME}">\n',),
    after=("</invoke>\n",),
    closer=("</minimax:tool_call>",),
    separator=(),
    parameter=ParameterFormat(before=(f'<parameter name="{KEY}">',), end=("</parameter>\n",)),
)

_FORMATS = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "mistral": _json_list("[TOOL_CALLS]"),
    "granite": _json_list("<|tool_call|>"),
    "phi4_mini": _json_list("functools"),
    "nemotron": _json_list("<TOOLCALL>", "</TOOLCALL>"),
    "tool_calls_list": _json_list("<tool_calls>", "</tool_calls>"),
    "command_r": _COMMAND,
    "kimi_k2": _KIMI,
    "harmony": _HARMONY,
    "qwen3_xml": _function_xml("<tool_call>", "</tool_call>"),
    "seed_oss": _function_xml("<seed:tool_call>", "</seed:tool_call>"),
    "glm": _GLM,
    "minimax": _MINIMAX,
}
"""By family, as `gateway.parsing.families` names them."""


def call_format(family: str | None, token_id: Callable[[str], int | None]) -> CallFormat | None:
    """A family's format; None where a call cannot be forced in it.

    Args:
        family: As `gateway.parsing.choice` tells it.
        token_id: Of the model's vocabulary: newer models of some families have tokens that older ones have not.
    """
    if family == "mistral" and token_id("[ARGS]") is not None:
        return _MISTRAL_TOKENS
    return _FORMATS.get(family or "")
