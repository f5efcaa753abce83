"""The grammar of a whole answer: reasoning, then calls or content, as a request constrains them.

Theory of operation. Whatever a caller constrains comes after the reasoning, which stays free:

    answer  = [reasoning] (calls | content)           a call is required, or content has a format
    answer  = [reasoning] (text call)* text           calls are up to the model, and their arguments are not
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.call_formats import CallFormat
from gateway.call_rules import write_calls, write_opened_calls
from gateway.chat_request import FormatAsked, Tool, ToolsAsked
from gateway.grammar import format_piece
from gateway.grammar_writer import GrammarWriter, Parts, TokenId, either, optional
from gateway.openai_errors import unsupported


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
        return _forced(offered, shape, many=tools.parallel and not tools.is_named)
    if form.kind != "text":
        return _formatted(form, offered, shape, many=tools.parallel)
    if tools.mode == "auto" and (tools.allowed or any(tool.strict for tool in offered)):
        return _free(offered, shape, tools)
    return ""


def offered_tools(tools: ToolsAsked) -> tuple[Tool, ...]:
    """Those that may be called."""
    if tools.mode == "none":
        return ()
    return tuple(tool for tool in tools.tools if not tools.allowed or tool.name in tools.allowed)


def _forced(offered: tuple[Tool, ...], shape: AnswerShape, *, many: bool) -> str:
    """Calls, and nothing but calls."""
    if shape.calls is None:
        raise unsupported("tool_choice", "a call cannot be forced in the format of this model's calls")
    writer = GrammarWriter(shape.token_id)
    calls = write_calls(writer, shape.calls, offered, many=many)
    return writer.compiled([*_reasoning(writer, shape), *calls], "tools")


def _formatted(asked: FormatAsked, offered: tuple[Tool, ...], shape: AnswerShape, *, many: bool) -> str:
    """Content of a format, or calls."""
    if not shape.takes_formats:
        raise unsupported(asked.param, "answers of this model's family cannot be constrained")
    writer = GrammarWriter(shape.token_id)
    body = [*writer.literals(*shape.content_lead), *writer.add_piece(format_piece(asked, "content"))]
    if offered:
        if shape.calls is None:
            raise unsupported(asked.param, "not together with tools in the format of this model's calls")
        body = either(body, write_calls(writer, shape.calls, offered, many=many))
    return writer.compiled([*_reasoning(writer, shape), *body], asked.param)


def _free(offered: tuple[Tool, ...], shape: AnswerShape, tools: ToolsAsked) -> str:
    """Text, in which each call is one of a tool that is offered, with arguments that follow its schema."""
    form = shape.calls
    if form is None or not form.opener:
        if tools.allowed:
            raise unsupported("tool_choice", "calls cannot be limited to some tools in this model's format of calls")
        return ""
    writer = GrammarWriter(shape.token_id)
    calls = [*writer.until(form.opener), *write_opened_calls(writer, form, offered, many=tools.parallel)]
    body = ["(", *calls, ")*", "TEXT"] if tools.parallel else either(calls, ["TEXT"])
    return writer.compiled([*_reasoning(writer, shape), *body], "tools")


def _reasoning(writer: GrammarWriter, shape: AnswerShape) -> Parts:
    """Reasoning that may come, or that must be closed as the prompt has opened it."""
    markers = shape.reasoning
    if markers is None:
        return []
    closed = [*writer.until(markers.closer), *(writer.literals(*markers.after) or ["SPACE"])]
    return closed if markers.is_open else optional([*writer.literals(*markers.opener), *closed])
