"""The grammar of a whole answer: reasoning, then calls or content, as a request constrains them.

Theory of operation. Whatever a caller constrains comes after the reasoning, which stays free:

    answer  = [reasoning] (calls | content)           a call is required, or content has a format
    answer  = [reasoning] (text call)* text           calls are up to the model, and their arguments are not

A marker that is a single token of the vocabulary is matched by its id, so that the text before it cannot swallow
it and it cannot be spelled out; any other is matched as text, lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.call_formats import CallFormat
from gateway.chat_request import FormatAsked, Tool, ToolsAsked
from gateway.grammar import Piece, compile_pieces, format_piece, json_piece, quote
from gateway.openai_errors import unsupported

CALLS_MAX = 128
"""What SDKs read."""

TokenId = Callable[[str], int | None]
"""The id of a text that is one added token; None for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarkers:
    """Where a model's reasoning stands in an answer; texts as `CallFormat` has them.

    Args:
        opener: Before it.
        closer: The marker that ends it.
        after: Between its end and what follows.
        is_open: The prompt has opened it already.
    """

    opener: tuple[str, ...]
    closer: str
    after: tuple[str, ...] = ()
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What a grammar must know of the model and its prompt.

    Args:
        token_id: Of the model's vocabulary.
        calls: How the model writes calls; None where that is not known.
        reasoning: None where it has none, or the prompt has closed it.
        content_lead: What the model writes before content.
        takes_formats: False where it is not known how the model writes content.
    """

    token_id: TokenId
    calls: CallFormat | None = None
    reasoning: ReasoningMarkers | None = None
    content_lead: tuple[str, ...] = ()
    takes_formats: bool = True


def answer_grammar(form: FormatAsked, tools: ToolsAsked, shape: AnswerShape) -> str:
    """The grammar that a request asks for; empty where it asks for none.

    Raises:
        ApiError: 400 that names the parameter which cannot be honoured, and says why.
    """
    offered = offered_tools(tools)
    if tools.mode == "required":
        if shape.calls is None:
            raise unsupported("tool_choice", "a call cannot be forced in the format of this model's calls")
        return _Writer(shape).forced(offered, many=tools.parallel and not tools.is_named)
    if form.kind != "text":
        return _Writer(shape).formatted(form, offered, many=tools.parallel)
    if _needs_grammar(tools, offered) and shape.calls is not None and shape.calls.opener:
        return _Writer(shape).free(offered, many=tools.parallel)
    if tools.allowed and tools.mode == "auto":
        raise unsupported("tool_choice", "calls cannot be limited to some tools in the format of this model's calls")
    return ""


def offered_tools(tools: ToolsAsked) -> tuple[Tool, ...]:
    """Those that may be called."""
    if tools.mode == "none":
        return ()
    return tuple(tool for tool in tools.tools if not tools.allowed or tool.name in tools.allowed)


def _needs_grammar(tools: ToolsAsked, offered: tuple[Tool, ...]) -> bool:
    """Whether calls that are up to the model must be constrained all the same."""
    return tools.mode == "auto" and (bool(tools.allowed) or any(tool.strict for tool in offered))


class _Writer:
    """Writes one grammar.

    Args:
        shape: Of the model's answers.
    """

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._rules = {"TEXT": "TEXT: /(.|\\n)*/", "SPACE": "SPACE: /[ \\n]{0,4}/"}
        self._pieces: list[Piece] = []

    def forced(self, offered: tuple[Tool, ...], *, many: bool) -> str:
        """Calls, and nothing but calls."""
        form = self._known_calls()
        return self._compiled([*self._reasoning(), *self._calls(form, offered, many=many)], "tools")

    def formatted(self, asked: FormatAsked, offered: tuple[Tool, ...], *, many: bool) -> str:
        """Content of a format, or calls."""
        if not self._shape.takes_formats:
            raise unsupported(asked.param, "answers of this model's family cannot be constrained")
        self._pieces.append(format_piece(asked, "content"))
        body = [*self._literals(*self._shape.content_lead), "@content"]
        if offered:
            if self._shape.calls is None:
                raise unsupported(asked.param, "not together with tools in the format of this model's calls")
            body = ["(", *body, "|", *self._calls(self._shape.calls, offered, many=many), ")"]
        return self._compiled([*self._reasoning(), *body], asked.param)

    def free(self, offered: tuple[Tool, ...], *, many: bool) -> str:
        """Text, in which each call is one of a tool that is offered, with arguments that follow its schema."""
        form = self._known_calls()
        calls = [*self._until(form.opener), *self._after_opener(form, offered, many=many)]
        body = ["(", *calls, ")*", "TEXT"] if many else ["(", *calls, "|", "TEXT", ")"]
        return self._compiled([*self._reasoning(), *body], "tools")

    def _calls(self, form: CallFormat, offered: tuple[Tool, ...], *, many: bool) -> list[str]:
        """One call, or several."""
        whole = [*self._literals(form.opener), *self._after_opener(form, offered, many=many)]
        if many and form.wraps_each and form.separator is not None:
            return _repeated(whole, self._literals(*form.separator))
        return whole

    def _after_opener(self, form: CallFormat, offered: tuple[Tool, ...], *, many: bool) -> list[str]:
        self._add_calls(form, offered)
        call = ["call"]
        if many and not form.wraps_each and form.separator is not None:
            call = _repeated(call, self._literals(*form.separator))
        return [*self._literals(*form.lead), *call, *self._literals(*form.closer)]

    def _add_calls(self, form: CallFormat, offered: tuple[Tool, ...]) -> None:
        """A rule for each function, and a piece for its arguments."""
        after = self._literals(*form.after)
        for index, tool in enumerate(offered):
            parts = [*self._literals(*form.before_call(tool.name)), f"@args_{index}", *after]
            self._rules[f"call_{index}"] = f"call_{index}: {' '.join(parts)}"
            self._pieces.append(json_piece(f"args_{index}", _arguments_schema(tool), strict=tool.strict))
        self._rules["call"] = "call: " + " | ".join(f"call_{index}" for index in range(len(offered)))

    def _reasoning(self) -> list[str]:
        """Reasoning that may come, or that must be closed as the prompt has opened it."""
        markers = self._shape.reasoning
        if markers is None:
            return []
        closed = [*self._until(markers.closer), *(self._literals(*markers.after) or ["SPACE"])]
        return closed if markers.is_open else ["(", *self._literals(*markers.opener), *closed, ")?"]

    def _until(self, marker: str) -> list[str]:
        """Any text up to a marker, and the marker."""
        token_id = self._shape.token_id(marker)
        if token_id is not None:
            return ["TEXT", f"<[{token_id}]>"]
        name = f"until_{len(self._rules)}"
        self._rules[name] = f"{name}[lazy]: /(.|\\n)*/ {quote(marker)}"
        return [name]

    def _literals(self, *texts: str) -> list[str]:
        ids = ((text, self._shape.token_id(text)) for text in texts if text)
        return [quote(text) if token_id is None else f"<[{token_id}]>" for text, token_id in ids]

    def _known_calls(self) -> CallFormat:
        if self._shape.calls is None:
            raise ValueError("the format of calls is not known")
        return self._shape.calls

    def _compiled(self, start: list[str], param: str) -> str:
        rules = "\n".join(["start: " + " ".join(start), *self._rules.values()])
        return compile_pieces([Piece(name="answer", lark=rules), *self._pieces], param)


def _arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Always of an object; of an empty one where the tool names no parameters, as OpenAI has it."""
    return {"type": "object", **(tool.parameters or {"properties": {}, "additionalProperties": False})}


def _repeated(item: list[str], separator: list[str]) -> list[str]:
    return [*item, "(", *separator, *item, f"){{0,{CALLS_MAX - 1}}}"]
