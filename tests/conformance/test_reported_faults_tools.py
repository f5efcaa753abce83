"""Faults of tool calls that users reported of other servers; each test is named for the symptom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance.caller import Caller, calling, rule

ARGUMENTS = {"city": "Paris \U0001f600", "note": 'say "hi" {now}\n', "days": [1, 2], "nested": {"deep": {"x": None}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TOOLS = {"tools": [TOOL]}


def call_text(arguments: Any = ARGUMENTS) -> str:
    """What a Hermes-like model writes to call the tool."""
    return f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': arguments})}\n</tool_call>"


def in_pieces(text: str, size: int) -> dict[str, Any]:
    """An answer whose tokens begin anew after so many characters."""
    return {"pieces": [text[start : start + size] for start in range(0, len(text), size)]}


def call_pieces(size: int) -> dict[str, Any]:
    """A call cut into pieces, its control tokens whole."""
    body = call_text().removeprefix("<tool_call>").removesuffix("</tool_call>")
    return {"pieces": ["<tool_call>", *in_pieces(body, size)["pieces"], "</tool_call>"]}


RULES = [
    rule("after the result", "It is sunny."),
    *(rule(f"pieces of {size}.", call_pieces(size)) for size in (1, 2, 5, 10_000)),
    rule("bytes", {"text": call_text(), "split": "byte"}),
    rule("two at once", f"{call_text({'city': 'a'})}\n{call_text({'city': 'b'})}"),
    rule("words first", f"Let me look.\n{call_text()}"),
    *(rule(f"caller {number} of 8", call_text({"city": f"town {number}"})) for number in range(8)),
    rule("choices", *(call_text({"city": f"town {number}"}) for number in range(3))),
    rule("cut call", call_text()),
    rule("no call", '{"just": "JSON"}'),
]


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    """One mesh for all tests of this file."""
    with calling(RULES) as running:
        yield running


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and decoded arguments of a choice's calls."""
    calls = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("prompt", ["pieces of 1.", "pieces of 2.", "pieces of 5.", "pieces of 10000.", "bytes"])
def test_arguments_are_lost_or_broken_in_a_stream(caller: Caller, prompt: str):
    """vllm#9693, #15274, #10398, #48852, #34887: however tokens fall, the pieces join to the whole answer's JSON.

    ollama#7881, vercel/ai#7238, #6041: the validator has checked index, id, type and name of every delta.
    """
    answer = caller.both(prompt, **TOOLS)
    assert calls_of(answer.whole["choices"][0]) == [("get_weather", ARGUMENTS)]
    assert answer.finish_reason == "tool_calls"


def test_two_calls_are_merged_into_one(caller: Caller):
    """vllm#48852: each has its index and its id."""
    answer = caller.both("two at once", **TOOLS)
    assert calls_of(answer.whole["choices"][0]) == [("get_weather", {"city": "a"}), ("get_weather", {"city": "b"})]


def test_a_stream_says_stop_where_the_whole_answer_says_tool_calls(caller: Caller):
    """python-genai#2868: both say tool_calls."""
    assert caller.both("bytes", **TOOLS).stream.finish_reason == "tool_calls"


def test_a_call_is_also_shown_as_text(caller: Caller):
    """LocalAI#10052, #9988: content is null beside a call, and text before it stays text."""
    assert caller.both("bytes", **TOOLS).text is None
    answer = caller.both("words first", **TOOLS)
    assert answer.text.strip() == "Let me look."
    assert calls_of(answer.whole["choices"][0]) == [("get_weather", ARGUMENTS)]


def test_calls_of_parallel_requests_are_mixed_up(caller: Caller):
    """vllm#38158, #38526, vllm-mlx#649: eight at once, each with its own arguments."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: caller.both(f"caller {number} of 8", **TOOLS), range(8)))
    for number, answer in enumerate(answers):
        assert calls_of(answer.whole["choices"][0]) == [("get_weather", {"city": f"town {number}"})]


def test_calls_of_choices_are_mixed_up(caller: Caller):
    """vllm#39214: three choices, three parsers."""
    choices = caller.both("choices", n=3, **TOOLS).whole["choices"]
    cities = [arguments["city"] for choice in choices for _, arguments in calls_of(choice)]
    assert sorted(cities) == ["town 0", "town 1", "town 2"]


def test_a_cut_call_is_called_complete(caller: Caller):
    """vllm#58228: the limit comes before the calls."""
    assert caller.both("cut call", max_tokens=12, **TOOLS).finish_reason == "length"


def test_json_that_is_no_call_becomes_one(caller: Caller):
    """LocalAI#9988: an object without a call's shape is the answer's text."""
    answer = caller.both("no call", **TOOLS)
    assert (answer.text, answer.finish_reason) == ('{"just": "JSON"}', "stop")


@pytest.mark.parametrize("tool_choice", ["none", None])
def test_odd_tool_settings_are_refused(caller: Caller, tool_choice: object):
    """VLLM refuses some: null is absent, an empty list of tools is none."""
    assert caller.chat("Are you there?", tool_choice=tool_choice, **TOOLS)["choices"]
    assert caller.chat("Are you there?", tools=[], tool_choice=None)["choices"]


def history(arguments: str) -> list[dict[str, Any]]:
    """A conversation in which the tool was called with these arguments."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "after the result"},
    ]


@pytest.mark.parametrize("arguments", ["{}", "", '{"city": "Paris"}'])
def test_arguments_in_the_history_end_in_a_server_error(caller: Caller, arguments: str):
    """Qwen3#1894, LocalAI#10256, omlx#854: the template gets an object, an empty string being an empty one."""
    assert caller.both(history(arguments), **TOOLS).text == "It is sunny."


@pytest.mark.parametrize("arguments", ['{"city": "Pa', "not JSON", "[1]", '"text"'])
def test_broken_arguments_in_the_history_poison_every_later_call(caller: Caller, arguments: str):
    """DeepSeek-Spark#55: a model may have written them, so they are a 400 at worst, never a 500."""
    response = caller.post(history(arguments), **TOOLS)
    assert response.status_code in {200, 400}, response.text
    caller.works()
