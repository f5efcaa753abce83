"""Tools and reasoning over real HTTP: the same answer streamed and whole, as the SDK's strictest client reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.generation_request import GenerationRequest, Token
from tests.support.api_server import ApiServer, running_api
from tests.support.text_tokenizers import build_byte_level

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' + (tools | tojson) + '</tools>' }}"
    "{{ '<tool_call></tool_call><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + ':' + c.function.arguments.city + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# <think></think> #}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris \U0001f600"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A model of the Hermes family that reasons."""
    folder: Path = build_byte_level(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "max_position_embeddings": 2048})
    )
    with running_api(folder) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with nothing scripted yet."""
    server.reset()
    return server


def both_ways(api: ApiServer, **parameters: Any) -> tuple[dict[str, Any], str]:
    """The whole answer's message and reason, after checking that the stream says the same."""
    choice = api.chat(**parameters).json()["choices"][0]
    message, stream = choice["message"], api.stream(**parameters).first
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert [(call.name, call.arguments) for call in stream.calls] == calls
    assert (stream.text, stream.reasoning) == (message["content"] or "", message.get("reasoning", ""))
    assert stream.finish_reason == choice["finish_reason"]
    return message, choice["finish_reason"]


def test_reasoning_content_and_calls(api: ApiServer):
    """Each in its field, ids unique, arguments valid JSON, and no marker in the content."""
    api.answer_with(f"<think>so</think>\n\nLet me look. {PARIS}\n{NOW}")
    message, reason = both_ways(api, tools=[WEATHER, TIME])
    assert (message["reasoning"], message["reasoning_content"]) == ("so", "so")
    assert message["content"].strip() == "Let me look."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"city": "Paris \U0001f600"},
        {},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert reason == "tool_calls"


def test_calls_alone_leave_the_content_null(api: ApiServer):
    """As OpenAI has it."""
    api.answer_with(PARIS)
    message, _ = both_ways(api, tools=[WEATHER])
    assert message["content"] is None


def test_without_tools_what_looks_like_a_call_is_text(api: ApiServer):
    """The caller asked for none, or forbade them; the model is then not told of any."""
    api.answer_with(NOW)
    assert both_ways(api)[0]["content"] == NOW
    message, reason = both_ways(api, tools=[TIME], tool_choice="none")
    assert (message["content"], reason) == (NOW, "stop")
    assert "<tools>" not in api.tokenizer.decode(api.generator.requests[-1].prompt_ids)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            },
            "tool_calls",
        ),
    ],
)
def test_a_forced_call_is_a_grammar_on_the_nodes(api: ApiServer, choice: Any, reason: str):
    """And ends with the reason that OpenAI gives."""
    api.answer_with(PARIS)
    _, found = both_ways(api, tools=[WEATHER, TIME], tool_choice=choice)
    assert found == reason
    params = api.generator.requests[-1].choices[0]
    assert ("get_weather" in params.grammar, "get_time" in params.grammar) == (
        "get_time" not in json.dumps(choice),
        "get_weather" not in json.dumps(choice),
    )
    assert params.end_ids == tuple(sorted(api.tokenizer.eos_ids))


def test_strict_tools_are_enforced_also_where_the_model_chooses(api: ApiServer):
    """Others leave the answer free."""
    api.answer_with(PARIS)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    both_ways(api, tools=[strict])
    assert "get_weather" in api.generator.requests[-1].choices[0].grammar
    both_ways(api, tools=[WEATHER])
    assert api.generator.requests[-1].choices[0].grammar == ""


def test_one_call_only_where_they_may_not_come_together(api: ApiServer):
    """The answer ends, and so does the work on the nodes."""
    api.answer_with(f"{PARIS}\n{NOW}\nand more")
    message, reason = both_ways(api, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert reason == "tool_calls"


@pytest.mark.parametrize("tokens", [30, 50])
def test_a_call_that_the_limit_cuts_is_not_finished(api: ApiServer, tokens: int):
    """The reason is `length`, streamed or not."""
    api.answer_with(PARIS)
    assert both_ways(api, tools=[WEATHER], max_tokens=tokens)[1] == "length"


def test_choices_do_not_share_a_parser(api: ApiServer):
    """Three answers interleaved token by token, each another; the same streamed and whole."""
    texts = [f"<think>a</think>{PARIS}", "plain", f"{NOW} {PARIS}"]
    ids = [[*api.tokenizer.encode_text(text), 2] for text in texts]

    def script(_request: GenerationRequest) -> list[Token]:
        rows = zip_longest(*ids)
        return [Token(token, choice) for row in rows for choice, token in enumerate(row) if token is not None]

    api.generator.script = script
    body = api.chat(tools=[WEATHER, TIME], n=3).json()
    stream = api.stream(tools=[WEATHER, TIME], n=3, stream_options={"include_usage": True})
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "stop", "tool_calls"]
    for choice in body["choices"]:
        streamed = stream.choices[choice["index"]]
        calls = choice["message"].get("tool_calls", [])
        assert [call.arguments for call in streamed.calls] == [call["function"]["arguments"] for call in calls]
        assert streamed.text == (choice["message"]["content"] or "")
    assert stream.usage is not None
    assert stream.usage == body["usage"]
    assert body["usage"]["completion_tokens"] == sum(map(len, ids))


def test_a_history_with_calls_is_rendered(api: ApiServer):
    """What a client sends back of an answer, and the function's result, with arguments decoded for the template."""
    api.answer_with("It rains.")
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert api.chat(messages=history, tools=[WEATHER]).status_code == 200
    assert "get_weather:Paris" in api.tokenizer.decode(api.generator.requests[-1].prompt_ids)
    call["function"]["arguments"] = '{"city": "Par'  # type: ignore[index]
    refused = api.chat(messages=history, tools=[WEATHER])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


class Weather(BaseModel):
    """What the SDK's helpers make a schema of."""

    city: str
    days: int = 1


def test_the_sdks_helpers_read_answers_of_a_model_class(api: ApiServer):
    """As a response format, and as a tool, whole and streamed."""
    client = api.client()
    api.answer_with('{"city": "Paris", "days": 2}')
    parsed = client.chat.completions.parse(**api.body(), response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Paris", days=2)
    assert '"city"' in api.generator.requests[-1].choices[0].grammar
    api.answer_with('<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>')
    tools = [openai.pydantic_function_tool(Weather)]
    with client.chat.completions.stream(**api.body(), tools=tools) as events:
        message = events.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Rome", days=3)
