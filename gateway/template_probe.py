"""What a chat template wants its messages to look like, told from its source and from rendering a probe.

Templates disagree on three points: whether a message's content is a string or a list of parts, whether the arguments
of a tool call are a mapping or JSON text, and which roles and variables there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

PROBE = "meshnet-probe"

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What a template may raise over messages that it was not written for."""

Render = Callable[[list[dict[str, Any]]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateWants:
    """How messages must be shaped for one template.

    Args:
        parts: Content must be a list of parts; a string will not do.
        argument_text: Arguments of calls must be JSON text; a mapping will not do.
        developer: It knows that role.
        tools: It shows tools.
        variables: Names of everything that it reads from outside.
    """

    parts: bool = False
    argument_text: bool = False
    developer: bool = False
    tools: bool = False
    variables: frozenset[str] = frozenset()


def probe_template(template: str | Mapping[str, str] | None, render: Render) -> TemplateWants:
    """Look at a template.

    Args:
        template: Its source, or several by name, of which transformers takes `tool_use` where tools are given.
        render: Renders messages with it.
    """
    if not template:
        return TemplateWants()
    sources = [template] if isinstance(template, str) else list(template.values())
    trees = [tree for source in sources if (tree := _parse(source)) is not None]
    variables = frozenset(name for tree in trees for name in meta.find_undeclared_variables(tree))
    return TemplateWants(
        parts=bool(trees) and any(map(_wants_parts, trees)),
        argument_text=_wants_argument_text(render),
        developer="developer" in json.dumps(template),
        tools="tools" in variables,
        variables=variables,
    )


class _Generation(Extension):
    """transformers' own tag, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands within it."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _parse(source: str) -> nodes.Template | None:
    """None for a template that does not even parse; every chat is then refused with the reason."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])  # noqa: S701 - parsed only
    try:
        return environment.parse(source)
    except jinja2.TemplateSyntaxError:
        return None


def _wants_parts(tree: nodes.Template) -> bool:
    """Whether it loops over a message's content without ever asking whether that is a string."""
    names = {
        assigned.target.name
        for assigned in tree.find_all(nodes.Assign)
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node, ())
    }
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    asks = any(
        test.name in ("string", "iterable") and _is_content(test.node, names) for test in tree.find_all(nodes.Test)
    )
    return loops and not asks


def _is_content(node: nodes.Node, names: Iterable[str]) -> bool:
    """Whether an expression is a message's content, perhaps filtered, or a variable that holds it."""
    match node:
        case nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner, names)
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case _:
            return False


def _wants_argument_text(render: Render) -> bool:
    return not _renders_call(render, {"probe": PROBE}) and _renders_call(render, json.dumps({"probe": PROBE}))


def _renders_call(render: Render, arguments: object) -> bool:
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "tool_call_id": "call00000", "name": "probe"},
    ]
    try:
        return PROBE in render(messages)
    except TEMPLATE_FAULTS:
        return False
