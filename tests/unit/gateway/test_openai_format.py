"""What content must match, in every spelling, and the template's parameters beside it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai_errors import ApiError
from gateway.openai_format import CHOICE_TEXTS_MAX, GRAMMAR_TEXT_CHARS_MAX, read_format
from gateway.openai_template import VARIABLES_MAX, read_template

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def json_schema(**form: Any) -> dict[str, Any]:
    """OpenAI's way to ask for a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": form}}


@pytest.mark.parametrize(
    ("body", "kind", "value", "param"),
    [
        ({}, "text", None, "response_format"),
        ({"response_format": {"type": "text"}}, "text", None, "response_format"),
        ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
        (
            json_schema(name="n", schema=SCHEMA, strict=True),
            "json_schema",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", None, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a", "b", "a"]}}, "choice", ("a", "b"), "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"', "structured_outputs.grammar"),
        ({"guided_json": '{"type": "object"}'}, "json_schema", '{"type": "object"}', "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ("a",), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"', "guided_grammar"),
        ({"guided_json_object": True}, "json_object", None, "guided_json_object"),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA, "json_schema"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"', "grammar"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"', "ebnf"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"regex": "", "grammar": "", "json_schema": {}, "guided_json_object": False}, "text", None, "response_format"),
    ],
)
def test_every_spelling_of_a_format(body: dict[str, Any], kind: str, value: object, param: str):
    """All mean one of the same few things, and a message names the caller's own word."""
    asked = read_format(body)
    assert (asked.kind, asked.value, asked.param) == (kind, value, param)


def test_a_schema_is_strict_unless_the_caller_says_otherwise():
    """Absent is strict: nobody asks for a schema to have it ignored."""
    assert read_format(json_schema(name="n", schema=SCHEMA)).strict
    assert not read_format(json_schema(name="n", schema=SCHEMA, strict=False)).strict


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (json_schema(schema=SCHEMA), "response_format.json_schema.name"),
        (json_schema(name="a b", schema=SCHEMA), "response_format.json_schema.name"),
        (json_schema(name="n"), "response_format.json_schema.schema"),
        (json_schema(name="n", schema=[]), "response_format.json_schema.schema"),
        (json_schema(name="n", schema={"type": "array"}), "response_format.json_schema.schema"),
        (json_schema(name="n", schema=SCHEMA, strict=1), "response_format.json_schema.strict"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["x"] * (CHOICE_TEXTS_MAX + 1)}, "guided_choice"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"grammar": "x" * (GRAMMAR_TEXT_CHARS_MAX + 1)}, "grammar"),
        ({"guided_json_object": 1}, "guided_json_object"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_is_no_format_is_refused_by_its_path(body: dict[str, Any], param: str):
    """A format that cannot be read is never taken for free text, and two are one too many."""
    with pytest.raises(ApiError) as caught:
        read_format(body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_templates_parameters_arrive():
    """Variables, documents, and how the prompt ends."""
    asked = read_template(
        {
            "chat_template_kwargs": {"a": 1},
            "enable_thinking": False,
            "documents": [{"text": "t"}],
            "reasoning_effort": "low",
        }
    )
    assert asked.kwargs == {"a": 1, "enable_thinking": False, "documents": [{"text": "t"}]}
    assert (asked.add_generation_prompt, asked.continue_final_message, asked.effort) == (True, False, "low")


def test_continuing_a_message_opens_no_turn():
    """The two exclude each other, and one of them is enough to say."""
    asked = read_template({"continue_final_message": True})
    assert (asked.add_generation_prompt, asked.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(index): 1 for index in range(VARIABLES_MAX + 1)}}, "chat_template_kwargs"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"chat_template_kwargs": {"documents": ["x"]}}, "chat_template_kwargs.documents[0]"),
        ({"chat_template_kwargs": {"documents": 5}}, "chat_template_kwargs.documents"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
    ],
)
def test_what_the_template_cannot_be_given_is_refused(body: dict[str, Any], param: str):
    """By name."""
    with pytest.raises(ApiError) as caught:
        read_template(body)
    assert (caught.value.status, caught.value.param) == (400, param)
