"""Callers never meet: what one gets does not depend on who else is served.

Two real nodes of a tiny model in float32, with fewer places than there are callers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.fleet import Fleet, running_fleet
from tests.support.stream_validator import validate_stream

pytestmark = pytest.mark.slow

PROMPTS = [f"{word} {number}" for number in range(4) for word in ("mesh", "Knoten", "你好", "😀")]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": ["a", "b", "c"]}, "m": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 6}},
    "required": ["n", "m"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 1},
    {"response_format": JSON, "seed": 2},
    {"n": 3, "seed": 3},
    {"logprobs": True, "top_logprobs": 3, "seed": 4},
    {"frequency_penalty": 1.5, "seed": 5},
    {"stop": ["e", "n"], "seed": 6},
    {"logit_bias": {"80": 20}, "seed": 7},
]


@pytest.fixture(scope="module")
def fleet(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes with six places each."""
    with running_fleet(
        tiny_model("qwen2"), ["0:3", "3:6"], tmp_path_factory.mktemp("fleet"), node_args={1: ["--kv-max-sessions", "6"]}
    ) as fleet:
        yield fleet


def text_of(response: httpx.Response) -> list[str]:
    """The choices' texts, whole or streamed."""
    assert response.status_code == httpx.codes.OK, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        return [choice.text for choice in validate_stream(response.content).choices.values()]
    return [choice["message"]["content"] for choice in response.json()["choices"]]


def test_sixteen_at_once_get_what_each_gets_alone(fleet: Fleet):
    """Greedy, different prompts, every other one streamed: byte for byte the serial answers."""

    def ask(index: int) -> list[str]:
        return text_of(fleet.chat(PROMPTS[index], temperature=0, max_tokens=24, stream=bool(index % 2)))

    serial = [ask(index) for index in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)))) == serial
    assert len({text for texts in serial for text in texts}) > len(PROMPTS) // 2, "the prompts must matter"


def test_a_seeded_answer_is_the_same_among_others(fleet: Fleet):
    """Grammars, penalties, choices, stop strings and log-probabilities of eight others leave it alone."""
    seeded = {"temperature": 1.0, "seed": 11, "max_tokens": 40, "presence_penalty": 0.5, "response_format": JSON}
    alone = text_of(fleet.chat("Hello", **seeded))
    alone_others = [text_of(fleet.chat("Hello", max_tokens=20, **other)) for other in OTHERS]
    with ThreadPoolExecutor(len(OTHERS) + 1) as pool:
        others = [pool.submit(fleet.chat, "Hello", max_tokens=20, **other) for other in OTHERS]
        among = text_of(pool.submit(fleet.chat, "Hello", **seeded).result())
        assert [text_of(other.result()) for other in others] == alone_others
    assert among == alone
    assert {node["sessions"] for node in fleet.mesh_nodes()} == {0}
