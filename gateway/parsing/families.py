"""Which family of models writes what, and the parser for one answer.

To add a family, add its name, a sentence, and how its parsers are made to `FAMILIES`, and to
`gateway/parsing/choice.py` what in a chat template tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gateway.parsing.choice import choose_family
from gateway.parsing.deepseek import DeepseekCalls
from gateway.parsing.function_xml import FunctionXmlCalls
from gateway.parsing.gemma import GemmaCalls
from gateway.parsing.glm import GlmCalls
from gateway.parsing.grammar import Grammar, Tools
from gateway.parsing.harmony import START, HarmonyParser
from gateway.parsing.invoke_xml import DSML, MINIMAX, InvokeXmlCalls
from gateway.parsing.json_calls import JsonCalls, JsonFormat
from gateway.parsing.kimi import KimiCalls
from gateway.parsing.kimi_xtml import KimiXtmlParser, opening
from gateway.parsing.llama_json import LlamaJsonCalls
from gateway.parsing.mistral import MistralCalls
from gateway.parsing.parser import OutputParser
from gateway.parsing.pipeline import PassThrough, ReasoningThenTools
from gateway.parsing.pythonic import PythonicCalls
from gateway.parsing.reasoning import ReasoningFormat, ReasoningParser

__all__ = ["FAMILIES", "Family", "choose_family", "create_parser"]


class CreateToolParser(Protocol):
    """Makes the parser of a family's calls."""

    def __call__(self, tools: Tools, *, whole_calls: bool = False) -> Grammar:
        """Make one for one answer."""


@dataclass(frozen=True, slots=True)
class Family:
    """One way in which models write calls, reasoning, or both.

    Attributes:
        description: What it looks like, and whose it is.
        create_tool_parser: Makes the parser of its calls; none where it has no calls.
        reasoning: Its reasoning's markers; none where it has none, or one grammar for everything.
        create_whole_parser: For a format in which one grammar reads everything, makes its parser from the tools,
            the prompt's end, and whether calls are given whole.
        ends_reasoning: Beginnings of its calls that also end reasoning which was not closed.
    """

    description: str
    create_tool_parser: CreateToolParser | None = None
    reasoning: ReasoningFormat | None = None
    create_whole_parser: Callable[[Tools, str, bool], Grammar] | None = None
    ends_reasoning: tuple[str, ...] = ()

    def create_reasoning_parser(self, *, prompt_ends_in_reasoning: bool) -> OutputParser:
        """Make the parser of the family's reasoning, to which calls are content.

        Raises:
            ValueError: The family has no reasoning of its own.
        """
        if self.reasoning is None:
            raise ValueError(f"no reasoning apart from the rest: {self.description}")
        return ReasoningParser(self.reasoning, is_open=prompt_ends_in_reasoning)


def create_parser(
    *,
    tool_family: str | None,
    reasoning_family: str | None,
    tools: Tools,
    prompt_tail: str,
    whole_calls: bool = False,
) -> OutputParser:
    """Make the parser for one answer.

    Args:
        tool_family: A name of `FAMILIES`, or none to leave calls in the content.
        reasoning_family: The same, of a family with reasoning, or none to leave that in the content.
        tools: The tools offered, as OpenAI's API has them. Some formats need their schemas, and those that do not
            mark their calls need their names.
        prompt_tail: The end of the rendered prompt, at least its last 100 characters: it may have opened the reasoning.
        whole_calls: Give a call only once it is complete. For an answer that is not streamed: a call that breaks
            off is then never given.

    Raises:
        ValueError: There is no such family, or it does not have what it is asked for.
    """
    families = [_family(name) for name in (tool_family, reasoning_family) if name is not None]
    for family in families:
        if family.create_whole_parser is not None:
            return family.create_whole_parser(tools, prompt_tail, whole_calls)
    parsers: list[OutputParser] = []
    ends = _family(tool_family).ends_reasoning if tool_family else ()
    if reasoning_family is not None:
        parsers.append(_reasoning_parser(_family(reasoning_family), prompt_tail, ends))
    if tool_family is not None:
        parsers.append(_tool_parser(_family(tool_family), tools, whole_calls=whole_calls))
    return ReasoningThenTools(*parsers) if len(parsers) == 2 else (parsers or [PassThrough()])[0]


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"no family {name!r}; there are: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _reasoning_parser(family: Family, prompt_tail: str, ended_by: tuple[str, ...]) -> OutputParser:
    form = family.reasoning
    if form is None:
        raise ValueError(f"no reasoning: {family.description}")
    return ReasoningParser(form, is_open=prompt_tail.rstrip().endswith(form.opener.rstrip()), ended_by=ended_by)


def _tool_parser(family: Family, tools: Tools, *, whole_calls: bool) -> OutputParser:
    if family.create_tool_parser is None:
        raise ValueError(f"no tool calls: {family.description}")
    return family.create_tool_parser(tools, whole_calls=whole_calls)


def _harmony(tools: Tools, prompt_tail: str, whole_calls: bool) -> Grammar:
    _, start, prefix = prompt_tail.rpartition(START)
    return HarmonyParser(tools, prefix=prefix.removeprefix("assistant") if start else "", whole_calls=whole_calls)


def _kimi_xtml(tools: Tools, prompt_tail: str, whole_calls: bool) -> Grammar:
    return KimiXtmlParser(tools, is_reasoning=prompt_tail.endswith(opening("think")), whole_calls=whole_calls)


def _json_family(description: str, form: JsonFormat) -> Family:
    return Family(description, create_tool_parser=partial(JsonCalls, form))


FAMILIES: Mapping[str, Family] = {
    "hermes": _json_family(
        "`<tool_call>{…}</tool_call>`, and without the tags: Hermes, Qwen2.5, Qwen3, Granite 4, and many others",
        JsonFormat(
            ("<tool_call>",),
            ("</tool_call>",),
            is_bare=True,
            special_tokens=frozenset({"<tool_call>", "</tool_call>"}),
        ),
    ),
    "llama3_json": Family('`{"name": …, "parameters": …}`, perhaps behind `<|python_tag|>`: Llama 3', LlamaJsonCalls),
    "pythonic": Family("`[f(a=1), g()]`: Llama 4 and others", PythonicCalls),
    "lfm2": Family(
        "`<|tool_call_start|>[f(a=1)]<|tool_call_end|>`: LFM2",
        partial(PythonicCalls, start="<|tool_call_start|>", end="<|tool_call_end|>"),
    ),
    "mistral": Family("`[TOOL_CALLS] [{…}]` and `[TOOL_CALLS]name[ARGS]{…}`: Mistral", MistralCalls),
    "deepseek_v3": Family("sections of `tool▁calls▁begin` tokens: DeepSeek V3, R1, V3.1", DeepseekCalls),
    "deepseek_dsml": Family("DSML `invoke` elements: DeepSeek V3.2, V4", partial(InvokeXmlCalls, DSML)),
    "minimax": Family("`<minimax:tool_call><invoke …>`: MiniMax M2", partial(InvokeXmlCalls, MINIMAX)),
    "glm": Family("`<tool_call>name<arg_key>…`: GLM 4.5 and later", GlmCalls),
    "qwen3_xml": Family(
        "`<tool_call><function=name><parameter=key>…`: Qwen3-Coder, Qwen3.5 and later",
        FunctionXmlCalls,
        ends_reasoning=("<tool_call>\n<function=",),
    ),
    "seed_oss": Family(
        "`<seed:tool_call><function=name>…`: Seed-OSS",
        partial(FunctionXmlCalls, opener="<seed:tool_call>", closer="</seed:tool_call>"),
        ReasoningFormat("<seed:think>", "</seed:think>", special_tokens=frozenset({"<seed:think>", "</seed:think>"})),
    ),
    "harmony": Family("channels of messages: gpt-oss", create_whole_parser=_harmony),
    "kimi_k2": Family("sections of `<|tool_call_begin|>` tokens: Kimi K2", KimiCalls),
    "kimi_k3": Family("XTML elements: Kimi K3", create_whole_parser=_kimi_xtml),
    "gemma4": Family(
        "`<|tool_call>call:name{…}<tool_call|>` and `<|channel>thought`: Gemma 4",
        GemmaCalls,
        ReasoningFormat("<|channel>thought", "<channel|>", special_tokens=frozenset({"<|channel>", "<channel|>"})),
    ),
    "granite": Family(
        '`<|tool_call|>[{…}]` and "Here is my thought process:": Granite 3',
        partial(
            JsonCalls,
            JsonFormat(
                ("<|tool_call|>", "<tool_call>"), ("</tool_call>",), special_tokens=frozenset({"<|tool_call|>"})
            ),
        ),
        ReasoningFormat("Here is my thought process:", "Here is my response:"),
    ),
    "phi4_mini": _json_family(
        "`functools[{…}]`: Phi-4-mini",
        JsonFormat(
            ("functools[", "<|tool_call|>"),
            ("<|/tool_call|>",),
            special_tokens=frozenset({"<|tool_call|>", "<|/tool_call|>"}),
        ),
    ),
    "command_r": Family(
        "`<|START_ACTION|>[{…}]<|END_ACTION|>`: Command R7B, Command A",
        partial(
            JsonCalls,
            JsonFormat(
                ("<|START_ACTION|>",),
                ("<|END_ACTION|>",),
                special_tokens=frozenset({"<|START_ACTION|>", "<|END_ACTION|>"}),
            ),
        ),
        ReasoningFormat(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            special_tokens=frozenset({"<|START_THINKING|>", "<|END_THINKING|>"}),
        ),
    ),
    "tool_calls_list": _json_family(
        "`<tool_calls>[{…}]</tool_calls>`: Hunyuan, Jamba", JsonFormat(("<tool_calls>",), ("</tool_calls>",))
    ),
    "nemotron": _json_family("`<TOOLCALL>[{…}]</TOOLCALL>`: Nemotron", JsonFormat(("<TOOLCALL>",), ("</TOOLCALL>",))),
    "think": Family(
        "`<think>…</think>`: DeepSeek R1, Qwen3, GLM, and many others",
        reasoning=ReasoningFormat("<think>", "</think>", special_tokens=frozenset({"<think>", "</think>"})),
    ),
    "mistral_think": Family(
        "`[THINK]…[/THINK]`: Magistral and later Mistral",
        reasoning=ReasoningFormat("[THINK]", "[/THINK]", trim=False, special_tokens=frozenset({"[THINK]", "[/THINK]"})),
    ),
}
"""By name: what a family looks like, and how its parsers are made."""
