"""Faults of connections and of chat templates that users reported of other servers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance.caller import CHAT, Caller, calling, rule
from tests.support.fleet import wait_until

NOTICED_S = 1.0
PAGE = "http://localhost:3000"
SDK_HEADERS = "authorization,content-type,openai-organization,x-stainless-lang,x-stainless-retry-count"
RULES = [
    rule("slow tokens", {"text": "word ", "end": False}, delay_s=0.02),
    rule("slow prompt", "never", first_delay_s=60),
    *(rule(f"caller {number} of 8", f"answer {number} " * 5) for number in range(8)),
]
ALTERNATING = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    """One mesh for all tests of this file."""
    with calling(RULES) as running:
        yield running


def leave(connection: socket.socket) -> None:
    """Close both ways."""
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Say that no more requests will come."""
    connection.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("how", [leave, half_close])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["slow tokens", "slow prompt"])
def test_generation_goes_on_after_the_client_has_gone(
    caller: Caller, prompt: str, stream: bool, how: Callable[[socket.socket], None]
):
    """llama.cpp#24496, sglang#36475, omlx#3013, pegainfer#215, ninfer#111: nothing goes on, a prefill neither."""
    body = json.dumps(caller.body(prompt, stream=stream, max_tokens=2000)).encode()
    connection = caller.connect()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    if stream and prompt == "slow tokens":
        assert b"200 OK" in connection.recv(65536)
    wait_until(lambda: caller.mesh.figures()["gateway"]["active"] == 1, "the generation to begin")
    how(connection)
    caller.mesh.wait_idle(NOTICED_S)
    connection.close()


def test_answers_of_parallel_calls_are_mixed_up(caller: Caller):
    """vllm#38158, vllm-mlx#649: eight streams at once, each with its own text."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: caller.both(f"caller {number} of 8").text, range(8)))
    assert answers == [f"answer {number} " * 5 for number in range(8)]


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models")])
def test_a_preflight_refuses_the_sdks_headers(caller: Caller, method: str, path: str):
    """ollama#4388, #8342, llamafile#600: OPTIONS grants whatever is asked for."""
    asked = {
        "origin": PAGE,
        "access-control-request-method": method,
        "access-control-request-headers": SDK_HEADERS,
    }
    response = caller.mesh.http.options(path, headers=asked)
    assert response.status_code in {200, 204}
    assert response.headers["access-control-allow-origin"] in {"*", PAGE}
    allowed = {name.strip().lower() for name in response.headers["access-control-allow-headers"].split(",")}
    assert set(SDK_HEADERS.split(",")) <= allowed


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_cannot_read_the_answer(caller: Caller, stream: bool):
    """ollama#9236, BricksLLM#45, flexllama#30: the stream itself, its errors and lists carry the headers too."""
    headers = {"origin": PAGE}
    post = caller.mesh.http.post
    responses = [
        post(CHAT, json=caller.body("Are you there?", stream=stream), headers=headers),
        post(CHAT, json=caller.body("Are you there?", stream=stream, temperature=9), headers=headers),
        caller.mesh.http.get("/v1/models", headers=headers),
    ]
    assert [response.status_code for response in responses] == [200, 400, 200]
    for response in responses:
        assert response.headers["access-control-allow-origin"] in {"*", PAGE}
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "System role not supported"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "must alternate"),
    ],
)
def test_a_template_that_refuses_the_messages_is_a_server_error(
    strict: Caller, messages: list[dict[str, Any]], words: str
):
    """mistral.rs#506, jan#6254, opencode#5034, #2272: a 400 with the template's own words."""
    error = strict.error(messages)
    assert words in error["message"]
    assert error["param"] == "messages"
    strict.works()


@pytest.fixture(scope="module")
def strict() -> Iterator[Caller]:
    """A model whose template takes alternating turns only."""
    with calling([], model={"chat_template": ALTERNATING}) as running:
        yield running


def test_the_prompt_begins_twice():
    """vllm#5278, sglang#888, vllm#27486, llama-cpp-python#1439: the template's BOS is the only one."""
    rules = [
        {"match": {"regex": r"^(<\|begin_of_text\|>){2}"}, "answers": ["two"]},
        {"match": {"regex": r"^<\|begin_of_text\|>"}, "answers": ["one"]},
        {"match": {"any": True}, "answers": ["none"]},
    ]
    with calling(rules, model={"bos": True}) as caller:
        assert caller.both("hello").text == "one"


def test_late_system_messages_and_text_parts_are_refused(caller: Caller):
    """opencode#5034, mlx-vlm#1137: several system messages in any place, and parts in order."""
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "Are you"}, {"type": "text", "text": "there?"}]},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "Are you there?"},
    ]
    assert caller.both(messages).text == "Yes."
