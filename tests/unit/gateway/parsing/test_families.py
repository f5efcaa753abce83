"""What each family's text means, in every cut."""

from __future__ import annotations

import json

import pytest

from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.parsing.families import FAMILIES, create_parser
from tests.support.parser_events import WEATHER, call, parse

BAR = "\N{FULLWIDTH VERTICAL LINE}"
PARIS = '{"city": "Paris"}'

CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {PARIS}}}',
    "pythonic": "[get_weather(city='Paris')]",
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{PARIS}",
    "deepseek_v3": f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>get_weather<{BAR}tool▁sep{BAR}>{PARIS}"
    f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
    "deepseek_dsml": f'<{BAR}DSML{BAR}tool_calls>\n<{BAR}DSML{BAR}invoke name="get_weather">\n<{BAR}DSML{BAR}parameter '
    f'name="city" string="true">Paris</{BAR}DSML{BAR}parameter>\n</{BAR}DSML{BAR}invoke>\n'
    f"</{BAR}DSML{BAR}tool_calls>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
    "</seed:tool_call>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]',
    "phi4_mini": f'functools[{{"name": "get_weather", "arguments": {PARIS}}}]',
    "tool_calls_list": f'<tool_calls>[{{"name": "get_weather", "arguments": {PARIS}}}]</tool_calls>',
    "nemotron": f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}]</TOOLCALL>',
}
"""One call in each family's format."""

CALLS_WITH_IDS = {
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{PARIS}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}",
    "command_r": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", '
    f'"parameters": {PARIS}}}]<|END_ACTION|>',
}
"""The same, in formats that give a call an id."""

IDS = {"kimi_k2": "functions.get_weather:0", "mistral": "a1b2c3d4e", "command_r": "0"}

NO_CALLS = [
    "Use <tool or <function in prose, a list [1, 2], {braces}, and a < b.",
    "[x for x in y]",
    '{"city": "Paris"}',
    "[TOOL and functools, <|tool",
    "{",
    "[",
    "  leading and trailing  \n",
]


def content_of(events: list[Event]) -> str:
    """Return the joined content."""
    return "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("whole_calls", [False, True])
def test_a_call_is_read(family: str, whole_calls: bool):
    """Every family's call gives the same events, whether as it arrives or whole."""
    assert parse(CALLS[family], tools=family, whole_calls=whole_calls) == call("get_weather", PARIS)


@pytest.mark.parametrize("family", CALLS_WITH_IDS)
def test_an_id_is_given_where_the_format_has_one(family: str):
    """Nothing is made up: an id is the model's own."""
    expected = call("get_weather", PARIS, call_id=IDS[family])
    assert parse(CALLS_WITH_IDS[family], tools=family) == expected


@pytest.mark.parametrize("family", sorted(set(CALLS) - {"llama3_json", "pythonic", "harmony"}))
def test_calls_have_their_index_and_text_around_them_is_content(family: str):
    """Two calls are calls 0 and 1; what stands before and after comes out once."""
    events = parse(f"Before{CALLS[family]}{CALLS[family]}After", tools=family)
    assert events == [
        Content("Before"),
        *call("get_weather", PARIS),
        *call("get_weather", PARIS, index=1),
        Content("After"),
    ]


@pytest.mark.parametrize("family", sorted({*CALLS, *CALLS_WITH_IDS} - {"harmony"}))
@pytest.mark.parametrize("text", NO_CALLS)
def test_text_that_looks_like_a_beginning_comes_out_whole(family: str, text: str):
    """Not a character of ordinary text is lost or changed."""
    assert parse(text, tools=family) == [Content(text)]


@pytest.mark.parametrize("family", sorted({*CALLS, *CALLS_WITH_IDS}))
def test_a_call_that_breaks_off_is_never_given_whole(family: str):
    """Wherever the output is cut, a client that waits for whole calls gets none, and nothing raises."""
    text = {**CALLS, **CALLS_WITH_IDS}[family]
    last = text.rindex("Paris") + 3
    for end in range(1, last):
        assert not any(isinstance(event, ToolCallBegin) for event in parse(text[:end], tools=family, whole_calls=True))


@pytest.mark.parametrize("family", sorted({*CALLS, *CALLS_WITH_IDS}))
def test_arguments_are_complete_only_with_the_call(family: str):
    """Arguments of a call that breaks off are the beginning of the complete ones, and no JSON themselves."""
    text = {**CALLS, **CALLS_WITH_IDS}[family]
    for end in range(len(text)):
        events = parse(text[:end], tools=family)
        given = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert PARIS.startswith(given)
        if given == PARIS:
            break
        with pytest.raises(json.JSONDecodeError):
            json.loads(given)


def test_arguments_arrive_as_the_model_writes_them():
    """A long argument does not wait for its end, in JSON and in other formats."""
    for family, before in (
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'),
        ("pythonic", "[get_weather(city='Par"),
        ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par"),
    ):
        parser = create_parser(tool_family=family, reasoning_family=None, tools=[WEATHER], prompt_tail="")
        events = parser.push(before) + parser.push("is")
        given = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert given in ('{"city": "Paris', '{"city": "Pari'), family


MALFORMED = {
    "hermes": "<tool_call>not json</tool_call>",
    "mistral": "[TOOL_CALLS] not json at all",
    "glm": "<tool_call>two words\n</tool_call>",
    "qwen3_xml": "<tool_call>\nno function</tool_call>",
    "gemma4": "<|tool_call>call:no brace<tool_call|>",
    "granite": '<|tool_call|>[{"arguments": {}}]',
    "minimax": "<minimax:tool_call>\n<invoke>\n</invoke>\n</minimax:tool_call>",
    "phi4_mini": "from functools[1]",
    "deepseek_v3": f"<{BAR}tool▁calls▁begin{BAR}>function<{BAR}tool▁calls▁end{BAR}>",
    "pythonic": "[get_weather(city=Paris)]",
    "command_r": '<|START_ACTION|>["x"]<|END_ACTION|>',
}


@pytest.mark.parametrize("family", MALFORMED)
def test_what_is_no_call_is_content_with_its_markers(family: str):
    """A caller sees what the model wrote, rather than nothing."""
    assert parse(MALFORMED[family], tools=family, whole_calls=True) == [Content(MALFORMED[family])]


def test_a_call_that_goes_wrong_after_it_was_given_ends_at_its_closer():
    """Given events cannot be taken back: the rest of the call is left out, and what follows is read as ever."""
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>'
    assert parse(f"{broken}Then{CALLS['hermes']}", tools="hermes") == [
        *call("get_weather", '{"city":'),
        Content("Then"),
        *call("get_weather", PARIS, index=1),
    ]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', PARIS),
        ('{"name": "get_weather"}', "{}"),
        ('{"name": "get_weather", "arguments": null}', "{}"),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', PARIS),
        ('{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}, "more": [1]}', PARIS),
    ],
)
def test_a_call_object_may_be_written_in_many_ways(written: str, arguments: str):
    """The order of members, their usual other names, and arguments that are a string again."""
    assert parse(f"<tool_call>{written}</tool_call>", tools="hermes") == call("get_weather", arguments)


def test_objects_in_one_tag_are_calls_of_their_own():
    """Some models put all calls between one pair of tags."""
    one = f'{{"name": "get_weather", "arguments": {PARIS}}}'
    assert parse(f"<tool_call>{one}\n{one}</tool_call>", tools="hermes") == [
        *call("get_weather", PARIS),
        *call("get_weather", PARIS, index=1),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```',
        '```\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```',
    ],
)
def test_hermes_reads_calls_without_their_tags(text: str):
    """Small Qwen2.5 models leave the tags out; the default chat model does."""
    assert parse(text, tools="hermes") == call("get_weather", PARIS)
    assert parse(f"{text}\n{text}Done", tools="hermes")[2:] == [
        *call("get_weather", PARIS, index=1),
        Content("Done"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "arguments": {}}',
        '```json\n{"city": "Paris"}\n```',
        "```python\nprint(1)\n```",
        'Like {"name": "get_weather", "arguments": {}}',
    ],
)
def test_json_that_is_the_answer_stays_content(text: str):
    """Without tags, an object must be a call of a tool that was offered, and begin the answer."""
    assert parse(text, tools="hermes") == [Content(text)]


def test_closing_brackets_too_many_are_left_out():
    """The tag behind them still ends the call."""
    text = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}}}\n</tool_call>Done'
    assert parse(text, tools="hermes") == [*call("get_weather", PARIS), Content("Done")]


def test_llama_calls_only_tools_that_were_offered():
    """An answer may be JSON: without its tag, a call must name a tool."""
    for text in ('{"name": "Bob", "parameters": {}}', '{"parameters": {}}', '{"a": 1} is a dict', "{}"):
        assert parse(text, tools="llama3_json") == [Content(text)]
    two = "; ".join([CALLS["llama3_json"]] * 2)
    assert parse(two, tools="llama3_json") == [*call("get_weather", PARIS), *call("get_weather", PARIS, index=1)]


def test_code_behind_llamas_tag_is_content():
    """The tag also announces code and built-in tools."""
    assert parse("<|python_tag|>print(1)", tools="llama3_json") == [Content("print(1)")]


def test_python_values_become_json():
    """Every literal has its JSON."""
    city = r"""'It\'s "x"\n\x41\u00e9'"""
    text = f"[get_weather(city={city}, days=-3, wind=True, filters={{'a': [1.5, None, ()], \"b\": {{}}}}, )]"
    (_, arguments) = parse(text, tools="pythonic")
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.text) == {
        "city": 'It\'s "x"\nAé',
        "days": -3,
        "wind": True,
        "filters": {"a": [1.5, None, []], "b": {}},
    }


@pytest.mark.parametrize("value", ["x", "1_0", "f(1)", "[1 2]", "{1: 2}", "1e999", "'\\xzz'", "[" * 80])
def test_other_python_is_no_call(value: str):
    """Expressions are not evaluated: what is no literal is content."""
    text = f"[get_weather(days={value})]"
    assert content_of(parse(text, tools="pythonic", whole_calls=True)) == text


def test_values_are_typed_by_the_schema():
    """The same text is a number, a text or an object, as the tool has it."""
    values = {"city": "3", "days": "3", "wind": "False", "note": "null", "filters": "{'a': 1}"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (_, arguments) = parse(f"<tool_call>\n<function=get_weather>\n{body}</function>\n</tool_call>", tools="qwen3_xml")
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.text) == {"city": "3", "days": 3, "wind": False, "note": None, "filters": {"a": 1}}


def test_a_value_may_show_the_tags_that_end_it():
    """An end counts only where the format goes on behind it."""
    value = "</parameter> and </function></tool_call> in a line"
    text = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert parse(text, tools="qwen3_xml") == call("get_weather", json.dumps({"city": value}))


def test_gemma_writes_nested_values():
    """Lists, objects, bare words, keys with spaces, and commas too many."""
    filters = '{a b:[1, {c:<|"|>}<|"|>},],d:[],<|"|>e<|"|>:x y,}'
    text = f"<|tool_call>call:get_weather{{days:3,city:007,filters:{filters}}}<tool_call|>"
    (_, arguments) = parse(text, tools="gemma4")
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.text) == {
        "days": 3,
        "city": "007",
        "filters": {"a b": [1, {"c": "}"}], "d": [], "e": "x y"},
    }


def test_harmony_reads_channels():
    """Reasoning, a preamble, a call and the answer are messages of one text."""
    text = (
        "<|channel|>analysis<|message|>Think about <|call|> here.<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert parse(text, tools="harmony", reasoning="harmony", prompt="<|start|>assistant") == [
        Reasoning("Think about <|call|> here."),
        Content("Wait."),
        *call("get_weather", PARIS),
        Content("Done."),
    ]


def test_harmony_goes_on_where_the_prompt_stopped():
    """A template may have written the header already, and nothing of the prompt comes out."""
    assert parse("Hello.", tools="harmony", prompt="<|start|>assistant") == [Content("Hello.")]
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>"
    assert parse("Hm.<|end|>", tools="harmony", reasoning="harmony", prompt=prompt) == [Reasoning("Hm.")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("No header at all. " * 80, [Content("No header at all. " * 80)]),
        ("<|channel|>final no message", [Content("final no message")]),
        ("<|channel|>commentary to=python<|message|>print(1)", []),
        ("<|channel|>strange<|message|>x", [Content("x")]),
        ("<|channel|>commentary to=functions.f<|message|>no json<|end|>", [Content("no json")]),
    ],
)
def test_harmony_recovers_from_headers_it_does_not_know(text: str, events: list[Event]):
    """Text without a header is content; a message to a built-in tool concerns nobody outside."""
    assert parse(text, tools="harmony", reasoning="harmony") == events


def test_kimi_k3_takes_arguments_as_one_object_too():
    """A call that was given as JSON text is rendered as a `json` element."""
    text = (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
        f"{PARIS}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    assert parse(text, tools="kimi_k3", reasoning="kimi_k3") == call("get_weather", PARIS)


def test_all_text_is_content_without_families():
    """A model that has neither calls nor reasoning is not read for them."""
    text = "<think>x</think><tool_call>"
    assert parse(text) == [Content(text)]


@pytest.mark.parametrize(
    ("tools", "reasoning"), [("none_such", None), (None, "none_such"), ("think", None), (None, "hermes")]
)
def test_a_family_must_have_what_it_is_asked_for(tools: str | None, reasoning: str | None):
    """A wrong name is our own mistake, and says so."""
    with pytest.raises(ValueError, match=r"no (family|reasoning|tool calls)"):
        create_parser(tool_family=tools, reasoning_family=reasoning, tools=[], prompt_tail="")


def test_every_family_says_what_it_is():
    """The page of families is made of these sentences."""
    assert all(family.description for family in FAMILIES.values())
    assert all(
        family.create_tool_parser or family.reasoning or family.create_whole_parser for family in FAMILIES.values()
    )


def test_special_tokens_of_both_parts_are_asked_for():
    """What is stripped before the parser cannot be found by it."""
    parser = create_parser(tool_family="mistral", reasoning_family="mistral_think", tools=[], prompt_tail="")
    assert {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"} <= parser.special_tokens
