"""The last hop is lost in the middle of everything it can be asked for, and no stream shows it.

Real processes and sockets. All of these streams run at once when the tail is killed, and each must be, to the
last log-probability's digit that matters, what it is when nothing happens: a draw is a function of the
parameters, the tokens before and the position, and all three come back with the rebuilt session.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.conftest import TinyModels
from tests.support.proxied_mesh import CUTS, Mesh, mesh_of
from tests.support.stream_validator import StreamedChoice, ValidStream, validate_stream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + 'answer with <tool_call></tool_call><|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LONG_OBJECT = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"enum": ["mesh", "node", "hop"]}, "minItems": 12, "maxItems": 12}
    },
    "required": ["words"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "words", "schema": LONG_OBJECT, "strict": True}}
TOOL = {"type": "function", "function": {"name": "say", "parameters": LONG_OBJECT, "strict": True}}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
PENALTIES = {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.2}
ASKED: dict[str, dict[str, Any]] = {
    "seeded": {**SEEDED, "min_p": 0.01, "top_k": 200},
    "penalties": {**SEEDED, **PENALTIES, "logit_bias": {"70": 3.5}, "min_tokens": 40},
    "schema": {**SEEDED, "response_format": SCHEMA, "max_tokens": 200},
    "tool": {**SEEDED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200},
    "three choices": {**SEEDED, "n": 3},
    "logprobs": {**SEEDED, "logprobs": True, "top_logprobs": 5},
}
KILL_AFTER_CHUNKS = 6
"""Of every stream: each is then in its middle."""
LOGPROB_TOLERANCE = 1e-3
"""A rebuilt cache is computed in chunks, so its numbers differ in their last digits."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """Three nodes of a tiny Qwen2 whose template knows tools, with room for all sessions at once."""
    model = tmp_path_factory.mktemp("model") / "tools"
    shutil.copytree(tiny_model("qwen2"), model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    folder: Path = tmp_path_factory.mktemp("mesh")
    async with mesh_of(model, folder, sessions_max=16, gateway_args=["--failover-timeout-seconds", "90"]) as mesh:
        yield mesh


class Started:
    """Counts the chunks of all streams; `all_running` is set when each is in its middle."""

    def __init__(self, streams: int) -> None:
        self._missing = streams
        self.all_running = asyncio.Event()
        self.ended = 0

    def count(self, chunks: int) -> None:
        """One stream has had so many chunks."""
        if chunks == KILL_AFTER_CHUNKS:
            self._missing -= 1
            if not self._missing:
                self.all_running.set()


async def stream(mesh: Mesh, started: Started, parameters: dict[str, Any]) -> ValidStream:
    """One stream, read to its end."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello mesh"}],
        "max_tokens": 80,
        "stream": True,
        "ignore_eos": "tools" not in parameters and "response_format" not in parameters,
        **parameters,
    }
    data, chunks = b"", 0
    url = mesh.fleet.base_url + "/v1/chat/completions"
    async with httpx.AsyncClient(timeout=90) as client, client.stream("POST", url, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise AssertionError((await response.aread()).decode())
        async for part in response.aiter_bytes():
            data += part
            chunks += part.count(b"data: ")
            for count in range(chunks - part.count(b"data: ") + 1, chunks + 1):
                started.count(count)
    started.ended += 1
    return validate_stream(data)


async def stream_all(mesh: Mesh, started: Started) -> dict[str, ValidStream]:
    """All of them at once."""
    streams = await asyncio.gather(*(stream(mesh, started, parameters) for parameters in ASKED.values()))
    return dict(zip(ASKED, streams, strict=True))


def said(choice: StreamedChoice) -> dict[str, Any]:
    """Everything but ids of calls, which are minted anew."""
    return {
        "text": choice.text,
        "calls": [(call.name, call.arguments) for call in choice.calls],
        "finish_reason": choice.finish_reason,
        "tokens": [entry["bytes"] for entry in choice.logprobs],
    }


async def test_every_stream_survives_the_loss_of_the_tail(mesh: Mesh) -> None:
    """Seeded, penalized, constrained by a schema, calling a tool, of three choices, with log-probabilities."""
    undisturbed = await stream_all(mesh, Started(len(ASKED)))
    words = json.loads(undisturbed["schema"].text)["words"]
    assert len(words) == 12
    (call,) = undisturbed["tool"].first.calls
    assert len(json.loads(call.arguments)["words"]) == 12
    assert len({choice.text for choice in undisturbed["three choices"].choices.values()}) == 3

    started = Started(len(ASKED))
    tail = mesh.fleet.nodes[len(CUTS) - 1]
    streaming = asyncio.create_task(stream_all(mesh, started))
    async with asyncio.timeout(60):
        await started.all_running.wait()
    assert not started.ended, "the tail must be lost in the middle of every stream"
    tail.kill()
    tail.start()
    disturbed = await streaming
    for name, stream_ in disturbed.items():
        assert stream_.error is None, f"{name}: {stream_.error}"
        assert {index: said(choice) for index, choice in stream_.choices.items()} == {
            index: said(choice) for index, choice in undisturbed[name].choices.items()
        }, name
    for before, after in zip(undisturbed["logprobs"].first.logprobs, disturbed["logprobs"].first.logprobs, strict=True):
        assert after["logprob"] == pytest.approx(before["logprob"], abs=LOGPROB_TOLERANCE)
    gateway = (await asyncio.to_thread(mesh.fleet.mesh))["gateway"]
    assert gateway["replays"] >= len(ASKED) + 2
    await mesh.until_held([0, 0, 0], within_s=2)
