"""Grammars, followed by llguidance's own matcher over a real vocabulary: what they accept, and what they do not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.answer_grammar import AnswerShape, ReasoningMarkers, answer_grammar
from gateway.answer_shape import answer_shape, call_id_minter
from gateway.call_formats import call_format
from gateway.chat_request import FormatAsked, Tool, ToolsAsked
from gateway.openai_errors import ApiError
from gateway.parsing.choice import FamilyChoice
from gateway.parsing.events import ToolCallBegin
from gateway.parsing.families import create_parser
from gateway.tokenizer import ChatTokenizer, load_tokenizer
from tests.support.text_tokenizers import build_byte_level

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT = Tool(name="f", parameters=SCHEMA, strict=True, definition={})
LOOSE = Tool(name="g", parameters={"properties": {"q": {"uniqueItems": True}}}, strict=False, definition={})
THINK = ReasoningMarkers(opener=("<think>",), closer="</think>")
HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HERMES_G = '<tool_call>\n{"name": "g", "arguments": {"q": [1, 1]}}\n</tool_call>'
FREE = FormatAsked()

Verdict = Callable[[str, str], str]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """With `<think>` as a token of its own and `</think>` as none: both ways of finding a marker."""
    folder = build_byte_level(tmp_path_factory.mktemp("model"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def verdict(tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    """What the nodes' matcher says of a text: `accepted`, `unfinished`, or `refused`."""
    folder: Path = build_byte_level(tmp_path_factory.mktemp("matcher"))
    vocabulary = LLTokenizer((folder / "tokenizer.json").read_text())

    def judge(grammar: str, text: str) -> str:
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        matcher.consume_tokens(list(tokenizer.encode_text(text)))
        if matcher.is_error():
            return "refused"
        return "accepted" if matcher.is_accepting() else "unfinished"

    return judge


def shape(tokenizer: ChatTokenizer, family: str | None = None, **known: Any) -> AnswerShape:
    """Of a model of this family."""
    return AnswerShape(token_id=tokenizer.added_id, calls=call_format(family, tokenizer.added_id), **known)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (
            FormatAsked(kind="json_object"),
            ['{"a": [1, {"b": null}]}', "{}", '{\n  "a": 1\n}'],
            ["[1]", "hi", '{"a":  1}'],
        ),
        (FormatAsked(kind="json_schema", value=SCHEMA), ['{"a": 1}', '{"a":-5}'], ['{"a": "x"}', "{}", '{"b": 1}']),
        (FormatAsked(kind="json_schema", value=json.dumps(SCHEMA)), ['{"a": 1}'], ["{}"]),
        (FormatAsked(kind="regex", value="[a-z]+/[0-9]{2}"), ["ab/12"], ["ab", "12/ab"]),
        (FormatAsked(kind="choice", value=("yes", 'no "q"')), ["yes", 'no "q"'], ["maybe", "no"]),
        (FormatAsked(kind="grammar", value='start: "a" /[0-9]+/'), ["a12"], ["b1", "a"]),
        (FormatAsked(kind="grammar", value='root ::= "a" [0-9]+'), ["a12"], ["b1", "a"]),
    ],
)
def test_content_follows_its_format(
    tokenizer: ChatTokenizer, verdict: Verdict, asked: FormatAsked, good: list[str], bad: list[str]
):
    """Every kind of format, in both notations of a grammar; white space between tokens of JSON is bounded."""
    grammar = answer_grammar(asked, ToolsAsked(), shape(tokenizer))
    assert [verdict(grammar, text) for text in good] == ["accepted"] * len(good)
    assert "accepted" not in [verdict(grammar, text) for text in bad]


PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"b":[1,2]}',
        '{"a": 1, "b": [1, 2]}',
        '{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}',
        '{"a": 1, "b": []}',
    ],
)
def test_json_may_be_compact_spaced_or_pretty(tokenizer: ChatTokenizer, verdict: Verdict, text: str):
    """As libraries write it."""
    asked = FormatAsked(kind="json_schema", value=PAIR)
    assert verdict(answer_grammar(asked, ToolsAsked(), shape(tokenizer)), text) == "accepted"


@pytest.mark.parametrize("text", ['{"a":1 ,"b":[]}', '{"a" : 1, "b": []}', '{"a": 1, "b": [1 , 2]}'])
def test_no_space_stands_before_a_comma_or_colon_of_json(tokenizer: ChatTokenizer, verdict: Verdict, text: str):
    """A small model that has once put one there tends to go on so."""
    asked = FormatAsked(kind="json_schema", value=PAIR)
    assert verdict(answer_grammar(asked, ToolsAsked(), shape(tokenizer)), text) != "accepted"


@pytest.mark.parametrize(
    ("is_open", "good", "bad"),
    [
        (False, ['{"a": 1}', '<think>so {</think>\n\n{"a": 1}'], ['so</think>{"a": 1}', '<think>so</think>{"a": "x"}']),
        (True, ['so {"a": "x"}</think>\n{"a": 1}'], ['{"a": 1}', "so</think> hi"]),
    ],
)
def test_reasoning_stays_free_before_a_format(
    tokenizer: ChatTokenizer, verdict: Verdict, is_open: bool, good: list[str], bad: list[str]
):
    """Optional where the prompt has not opened it; to be closed where it has."""
    reasoning = ReasoningMarkers(opener=("<think>",), closer="</think>", is_open=is_open)
    grammar = answer_grammar(
        FormatAsked(kind="json_schema", value=SCHEMA), ToolsAsked(), shape(tokenizer, reasoning=reasoning)
    )
    assert [verdict(grammar, text) for text in good] == ["accepted"] * len(good)
    assert "accepted" not in [verdict(grammar, text) for text in bad]


FORCED = {
    "hermes": HERMES_F,
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]',
    "phi4_mini": 'functools[{"name": "f", "arguments": {"a": 1}}]',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>',
    "tool_calls_list": '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
    "command_r": '<|START_ACTION|>[\n    {"tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
}


@pytest.mark.parametrize("family", FORCED)
def test_a_forced_call_is_one_that_the_familys_own_parser_reads(
    tokenizer: ChatTokenizer, verdict: Verdict, family: str
):
    """The grammar accepts the call and no text, and the parser finds the function in what it accepts."""
    tools = ToolsAsked(tools=(STRICT, LOOSE), mode="required")
    grammar = answer_grammar(FREE, tools, shape(tokenizer, family))
    text = FORCED[family]
    assert verdict(grammar, text) == "accepted"
    assert verdict(grammar, text.replace("1", '"x"')) == "refused"
    assert verdict(grammar, "hello") == "refused"
    offered = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    reasoning = "harmony" if family == "harmony" else None
    parser = create_parser(
        tool_family=family, reasoning_family=reasoning, tools=offered, prompt_tail="<|start|>assistant"
    )
    events = parser.push(text) + parser.finish()
    assert [event.name for event in events if isinstance(event, ToolCallBegin)] == ["f"]


ARGUMENTS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["mm", "cm"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["text"],
    "$defs": {"tag": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("<parameter=text>\na\n<b> c\n</parameter>\n", "accepted"),
        ("<parameter=text>\na\n</parameter>\n<parameter=unit>\ncm\n</parameter>\n", "accepted"),
        ('<parameter=text>\na\n</parameter>\n<parameter=tags>\n["x", "y"]\n</parameter>\n', "accepted"),
        ("<parameter=text>\na\n</parameter>\n<parameter=unit>\nkm\n</parameter>\n", "refused"),
        ("<parameter=text>\na\n</parameter>\n<parameter=tags>\n[1]\n</parameter>\n", "refused"),
        ("<parameter=unit>\ncm\n</parameter>\n", "refused"),
        ("", "refused"),
    ],
)
def test_arguments_that_are_written_one_by_one_follow_their_schemas(
    tokenizer: ChatTokenizer, verdict: Verdict, arguments: str, expected: str
):
    """Text is free up to its end, everything else is JSON of its own schema, and what is required is there."""
    tool = Tool(name="f", parameters=ARGUMENTS, strict=True, definition={})
    tools = ToolsAsked(tools=(tool,), mode="required")
    grammar = answer_grammar(FREE, tools, shape(tokenizer, "qwen3_xml"))
    assert verdict(grammar, f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>") == expected


def test_an_argument_whose_name_its_format_cannot_write_is_a_400(tokenizer: ChatTokenizer):
    """It could not be read back."""
    tool = Tool(name="f", parameters={"properties": {"a>b": {}}}, strict=True, definition={})
    with pytest.raises(ApiError, match="a>b"):
        answer_grammar(FREE, ToolsAsked(tools=(tool,), mode="required"), shape(tokenizer, "qwen3_xml"))


def test_several_calls_may_be_forced_unless_the_caller_wants_one(tokenizer: ChatTokenizer, verdict: Verdict):
    """`parallel_tool_calls: false`, and a function that is named, allow one."""
    two = f"{HERMES_F}\n{HERMES_G}"
    many = ToolsAsked(tools=(STRICT, LOOSE), mode="required")
    single = ToolsAsked(tools=(STRICT, LOOSE), mode="required", parallel=False)
    named = ToolsAsked(tools=(STRICT, LOOSE), mode="required", allowed=("f",), is_named=True)
    verdicts = [
        verdict(answer_grammar(FREE, tools, shape(tokenizer, "hermes")), two) for tools in (many, single, named)
    ]
    assert verdicts == ["accepted", "refused", "refused"]
    trailing = answer_grammar(FREE, many, shape(tokenizer, "hermes"))
    assert verdict(trailing, f"{HERMES_F}\n") == "accepted", "a line break after a call does not force another"
    assert verdict(answer_grammar(FREE, named, shape(tokenizer, "hermes")), HERMES_G) == "refused"


def test_reasoning_may_come_before_a_forced_call(tokenizer: ChatTokenizer, verdict: Verdict):
    """And need not."""
    tools = ToolsAsked(tools=(STRICT,), mode="required")
    grammar = answer_grammar(FREE, tools, shape(tokenizer, "hermes", reasoning=THINK))
    assert [verdict(grammar, text + HERMES_F) for text in ("", "<think>so</think>\n\n")] == ["accepted"] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello <", "accepted"),
        (f"hi {HERMES_F} bye", "accepted"),
        (f"<think>{HERMES_F.replace('1', '2.5')}</think>hi {HERMES_F}\n{HERMES_G}", "accepted"),
        (HERMES_F.replace("1", '"x"'), "refused"),
        (HERMES_F.replace('"f"', '"h"'), "refused"),
    ],
)
def test_calls_that_are_up_to_the_model_follow_strict_schemas(
    tokenizer: ChatTokenizer, verdict: Verdict, text: str, expected: str
):
    """Text and reasoning are free, a call is not."""
    tools = ToolsAsked(tools=(STRICT, LOOSE), mode="auto")
    assert verdict(answer_grammar(FREE, tools, shape(tokenizer, "hermes", reasoning=THINK)), text) == expected


def test_one_call_at_most_where_calls_may_not_come_together(tokenizer: ChatTokenizer, verdict: Verdict):
    """Nothing follows it."""
    tools = ToolsAsked(tools=(STRICT,), mode="auto", parallel=False)
    grammar = answer_grammar(FREE, tools, shape(tokenizer, "hermes"))
    texts = ("hi", f"hi {HERMES_F}", f"hi {HERMES_F}\n{HERMES_F}")
    assert [verdict(grammar, text) for text in texts] == ["accepted", "accepted", "refused"]


def test_only_allowed_tools_may_be_called(tokenizer: ChatTokenizer, verdict: Verdict):
    """All are shown to the model."""
    tools = ToolsAsked(tools=(STRICT, LOOSE), mode="auto", allowed=("g",))
    grammar = answer_grammar(FREE, tools, shape(tokenizer, "hermes"))
    assert [verdict(grammar, text) for text in (HERMES_F, HERMES_G)] == ["refused", "accepted"]


def test_content_of_a_format_or_a_call(tokenizer: ChatTokenizer, verdict: Verdict):
    """Where both are asked for the model chooses."""
    tools = ToolsAsked(tools=(LOOSE,), mode="auto")
    grammar = answer_grammar(FormatAsked(kind="json_schema", value=SCHEMA), tools, shape(tokenizer, "hermes"))
    assert [verdict(grammar, text) for text in ('{"a": 1}', HERMES_G, "hi")] == ["accepted", "accepted", "refused"]


@pytest.mark.parametrize(
    "tools",
    [ToolsAsked(), ToolsAsked(tools=(STRICT,), mode="none"), ToolsAsked(tools=(LOOSE,), mode="auto")],
)
def test_nothing_is_constrained_that_nobody_constrains(tokenizer: ChatTokenizer, tools: ToolsAsked):
    """No grammar, no cost."""
    assert answer_grammar(FREE, tools, shape(tokenizer, "hermes")) == ""


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}, "look-around"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "nope"}, "nope"),
        ("{", "JSON"),
        ("[]", "object"),
        ({"type": "object", "properties": {f"p{index}": {"const": "x" * 90} for index in range(1000)}}, "characters"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_a_400_with_the_reason(
    tokenizer: ChatTokenizer, schema: object, words: str
):
    """Never free text."""
    asked = FormatAsked(kind="json_schema", value=schema, param="response_format.json_schema.schema")
    with pytest.raises(ApiError, match=words) as caught:
        answer_grammar(asked, ToolsAsked(), shape(tokenizer))
    assert (caught.value.status, caught.value.param) == (400, "response_format.json_schema.schema")


@pytest.mark.parametrize(("kind", "value"), [("regex", "["), ("grammar", "start: nothing"), ("grammar", "root ::= (")])
def test_an_expression_or_grammar_that_is_none_is_a_400(tokenizer: ChatTokenizer, kind: Any, value: str):
    """With llguidance's words."""
    with pytest.raises(ApiError, match="cannot be enforced"):
        answer_grammar(FormatAsked(kind=kind, value=value), ToolsAsked(), shape(tokenizer))


def test_a_schema_that_is_not_strict_goes_as_far_as_it_can(tokenizer: ChatTokenizer, verdict: Verdict):
    """What cannot be enforced is left out, the rest is not."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    asked = FormatAsked(kind="json_schema", value=schema, strict=False)
    grammar = answer_grammar(asked, ToolsAsked(), shape(tokenizer))
    assert [verdict(grammar, text) for text in ('{"a": [1, 1]}', '{"a": 1}')] == ["accepted", "refused"]


@pytest.mark.parametrize(
    ("form", "tools", "param"),
    [
        (FREE, ToolsAsked(tools=(STRICT,), mode="required"), "tool_choice"),
        (FREE, ToolsAsked(tools=(STRICT, LOOSE), mode="auto", allowed=("f",)), "tool_choice"),
        (FormatAsked(kind="json_object"), ToolsAsked(tools=(STRICT,), mode="auto"), "response_format"),
    ],
)
def test_what_a_models_format_of_calls_does_not_allow_is_refused(
    tokenizer: ChatTokenizer, form: FormatAsked, tools: ToolsAsked, param: str
):
    """Some families' calls can be read but not forced."""
    with pytest.raises(ApiError) as caught:
        answer_grammar(form, tools, shape(tokenizer, "pythonic"))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_newer_mistral_models_write_names_between_tokens():
    """Their tokenizers have one more."""
    form = call_format("mistral", {"[ARGS]": 5}.get)
    assert form is not None
    assert form.before_call("f") == ("f", "[ARGS]")


def test_a_prompt_tells_whether_reasoning_is_open_or_closed(tokenizer: ChatTokenizer):
    """As templates open it, or close it at once where it is switched off."""
    families = FamilyChoice("hermes", "think")
    markers = [
        answer_shape(families, tokenizer.added_id, f"<|im_start|>assistant\n{end}").reasoning
        for end in ("", "<think>\n", "<think>\n\n</think>\n\n")
    ]
    assert [one.is_open if one else None for one in markers] == [False, True, None]


def test_harmony_has_channels_before_content(tokenizer: ChatTokenizer, verdict: Verdict):
    """Reasoning, then JSON in the final channel."""
    shape_ = answer_shape(FamilyChoice("harmony", "harmony"), tokenizer.added_id, "<|start|>assistant")
    grammar = answer_grammar(FormatAsked(kind="json_schema", value=SCHEMA), ToolsAsked(), shape_)
    final = '<|channel|>final<|message|>{"a": 1}'
    analysis = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    assert [verdict(grammar, text) for text in (final, analysis + final, '{"a": 1}')] == [
        "accepted",
        "accepted",
        "refused",
    ]


def test_a_family_whose_content_is_not_plain_takes_no_format(tokenizer: ChatTokenizer):
    """Rather than an answer that nobody can read."""
    shape_ = answer_shape(FamilyChoice("kimi_k3", "kimi_k3"), tokenizer.added_id, "")
    with pytest.raises(ApiError, match="family"):
        answer_grammar(FormatAsked(kind="json_object"), ToolsAsked(), shape_)


def test_ids_of_calls_are_such_as_the_familys_templates_take_back():
    """Mistral's check theirs."""
    assert re.fullmatch(r"[0-9a-f]{9}", call_id_minter(FamilyChoice("mistral", None))())
    assert call_id_minter(FamilyChoice("hermes", None))().startswith("call_")


def test_a_schema_that_is_nested_without_end_is_a_400(tokenizer: ChatTokenizer):
    """Whatever gives up first."""
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(ApiError, match=r"deeply|recursion"):
        answer_grammar(FormatAsked(kind="json_schema", value=schema), ToolsAsked(), shape(tokenizer))


MANY = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1000)}}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (FormatAsked(kind="json_schema", value={"type": "integer", "multipleOf": 99_999_989}), "least common multiple"),
        (
            FormatAsked(
                kind="json_schema", value={"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}
            ),
            "least common multiple",
        ),
        (FormatAsked(kind="grammar", value='start: %json {"type": "integer", "multipleOf": 999983}'), "multiple"),
        (FormatAsked(kind="regex", value="a{1000000}"), "too many expressions"),
        (FormatAsked(kind="json_schema", value=MANY), "items"),
        (FormatAsked(kind="grammar", value="start: root\nroot: root"), "NoExtensionBias"),
    ],
)
def test_what_only_a_node_would_find_out_is_refused_before(
    tokenizer: ChatTokenizer, asked: FormatAsked, reason: str
) -> None:
    """A small text can be an automaton that a node builds for minutes, or refuses in the middle of an answer."""
    with pytest.raises(ApiError, match=reason) as caught:
        answer_grammar(asked, ToolsAsked(), shape(tokenizer, "hermes"))
    assert (caught.value.status, caught.value.param) == (400, "response_format")


@pytest.mark.parametrize("multiple", [1, 5, 0.01, 0.25, 1000, 2_500_000, 9973])
def test_usual_multiples_are_followed(tokenizer: ChatTokenizer, multiple: float) -> None:
    """Powers of ten cost nothing."""
    asked = FormatAsked(kind="json_schema", value={"type": "number", "multipleOf": multiple})
    assert answer_grammar(asked, ToolsAsked(), shape(tokenizer, "hermes"))
