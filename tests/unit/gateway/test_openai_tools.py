"""Tools and the choice among them: every form that clients send, and what is refused by which path."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai_errors import ApiError
from gateway.openai_tools import SCHEMA_BYTES_MAX, TOOLS_MAX, read_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    """A tool as the API has it."""
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    """A choice of one function."""
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A choice among some."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def refused_param(**body: Any) -> str | None:
    """The `param` of the refusal."""
    with pytest.raises(ApiError) as caught:
        read_tools(body)
    assert caught.value.status == 400
    return caught.value.param


def test_a_tool_arrives_with_its_schema_and_as_it_was_given():
    """The template shows the definition, the grammar follows the schema."""
    given = tool("get_weather", description="d", parameters=SCHEMA, strict=True)
    (read,) = read_tools({"tools": [given]}).tools
    assert (read.name, read.parameters, read.strict, read.definition) == ("get_weather", SCHEMA, True, given)


@pytest.mark.parametrize(
    ("body", "mode", "names", "is_named"),
    [
        ({}, "none", (), False),
        ({"tools": []}, "none", (), False),
        ({"tools": [], "tool_choice": "auto"}, "none", (), False),
        ({"tools": [tool()]}, "auto", (), False),
        ({"tools": [tool()], "tool_choice": None}, "auto", (), False),
        ({"tools": [tool()], "tool_choice": "none"}, "none", (), False),
        ({"tools": [tool()], "tool_choice": "required"}, "required", (), False),
        ({"tools": [tool(), tool("g")], "tool_choice": named("g")}, "required", ("g",), True),
        ({"tools": [tool(), tool("g")], "tool_choice": allowed("auto", "g")}, "auto", ("g",), False),
        ({"tools": [tool(), tool("g")], "tool_choice": allowed("required", "g", "f")}, "required", ("g", "f"), False),
    ],
)
def test_every_form_of_a_choice(body: dict[str, Any], mode: str, names: tuple[str, ...], is_named: bool):
    """Tools are offered unless the caller says otherwise."""
    tools = read_tools(body)
    assert (tools.mode, tools.allowed, tools.is_named) == (mode, names, is_named)


def test_calls_may_come_together_unless_the_caller_forbids_it():
    """As OpenAI has it."""
    assert read_tools({}).parallel
    assert not read_tools({"parallel_tool_calls": False}).parallel


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool(str(index)) for index in range(TOOLS_MAX + 1)]}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": [tool(parameters={"description": "x" * SCHEMA_BYTES_MAX})]}, "tools"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [tool()], "tool_choice": allowed("some", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": [tool()], "tool_choice": allowed("auto", "g")},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_what_is_no_tool_or_no_choice_is_refused_by_its_path(body: dict[str, Any], param: str):
    """The caller is told which of many tools, and where in it."""
    assert refused_param(**body) == param
