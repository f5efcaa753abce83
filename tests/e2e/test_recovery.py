"""What happens to a stream when a node loses its cache, dies, stalls, or the client leaves.

Real processes and sockets: three nodes of a tiny model behind delaying proxies, so that there is time to
interfere in mid-stream. Every undisturbed answer comes from transformers in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.conftest import TinyModels
from tests.support.fleet import Fleet
from tests.support.proxied_mesh import CUTS, Mesh, mesh_of
from tests.support.reference import Reference
from tests.support.stream_validator import validate_stream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MAX_TOKENS = 60
PROMPT = "Hello mesh"
OTHER_PROMPT = "Wie geht es?"
FAILOVER_TIMEOUT_S = 3
DETECTED_WITHIN_S = 8
"""Two seconds of silence, and room for a machine that is busy."""
RELEASED_WITHIN_S = 1.0


@dataclass
class Streamed:
    """What came over one stream."""

    text: str = ""
    chunks: int = 0
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False


Interfere = Callable[[int], Awaitable[None]]


async def stream_chat(fleet: Fleet, content: str, interfere: Interfere | None = None, **parameters: Any) -> Streamed:
    """Stream one greedy completion; `interfere` is awaited after each chunk with the number of chunks so far."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        **parameters,
    }
    streamed, lines = Streamed(), list[str]()
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", fleet.base_url + "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == httpx.codes.OK, (await response.aread()).decode()
        async for line in response.aiter_lines():
            lines.append(line)
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                streamed.done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                streamed.error = chunk["error"]
                continue
            choice = chunk["choices"][0]
            streamed.text += choice["delta"].get("content") or ""
            streamed.finish_reason = choice["finish_reason"] or streamed.finish_reason
            streamed.chunks += 1
            if interfere:
                await interfere(streamed.chunks)
    validate_stream("\n".join([*lines, ""]).encode())
    return streamed


def at_chunks(*whens: int, do: Callable[[], Awaitable[None]]) -> Interfere:
    """Interfere once at each of these chunk counts."""

    async def interfere(chunks: int) -> None:
        if chunks in whens:
            await do()

    return interfere


@pytest.fixture(scope="module")
def model(tiny_model: TinyModels) -> Path:
    """A tiny Qwen2, whose tokens depend on the whole history."""
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    """The same model in this process."""
    return Reference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """One fleet for all tests that leave it as they found it."""
    async with mesh_of(
        model, tmp_path_factory.mktemp("mesh"), gateway_args=["--failover-timeout-seconds", "90"]
    ) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient_mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A fleet that waits for a lost node no longer than `FAILOVER_TIMEOUT_S`."""
    args = ["--failover-timeout-seconds", str(FAILOVER_TIMEOUT_S), "--route-wait-seconds", "0.1"]
    async with mesh_of(model, tmp_path_factory.mktemp("impatient"), gateway_args=args) as mesh:
        yield mesh


Figures = list[dict[str, Any]]


def risen(before: Figures, after: Figures, figure: str, key: str) -> list[int]:
    """By how much a counter of every node has risen."""
    return [new[figure].get(key, 0) - old[figure].get(key, 0) for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_lost_cache_is_rebuilt_on_that_hop_alone(mesh: Mesh, reference: Reference, hop: int) -> None:
    """A session evicted twice in mid-stream, with another generation running, changes no token and no other hop."""
    expected = reference.greedy(PROMPT, MAX_TOKENS)
    other_expected = reference.greedy(OTHER_PROMPT, MAX_TOKENS)
    before, evictions = await mesh.nodes(), mesh.evictions
    interfere = at_chunks(8, 20, do=lambda: mesh.evict_all(hop))
    streamed, other = await asyncio.gather(
        stream_chat(mesh.fleet, PROMPT, interfere), stream_chat(mesh.fleet, OTHER_PROMPT)
    )
    after = await mesh.nodes()
    assert (streamed.text, streamed.finish_reason, streamed.done) == (expected.text, expected.finish_reason, True)
    assert (other.text, other.finish_reason) == (other_expected.text, other_expected.finish_reason)
    prefills = risen(before, after, "steps", "prefill")
    misses = risen(before, after, "misses", "evicted")
    assert misses[hop] >= 2
    assert prefills[hop] == 2 + (mesh.evictions - evictions) + misses[hop]
    for index in {0, 1, 2} - {hop}:
        assert (prefills[index], misses[index]) == (2, 0)


async def test_sampled_text_survives_a_lost_cache(mesh: Mesh) -> None:
    """A seeded stream whose every hop loses its session gives the text of the undisturbed stream."""
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 20}
    undisturbed = await stream_chat(mesh.fleet, PROMPT, **sampling)
    before = await mesh.nodes()

    async def evict_everywhere() -> None:
        await asyncio.gather(*(mesh.evict_all(hop) for hop in range(len(CUTS))))

    disturbed = await stream_chat(mesh.fleet, PROMPT, at_chunks(6, do=evict_everywhere), **sampling)
    other_seed = await stream_chat(mesh.fleet, PROMPT, **{**sampling, "seed": 21})
    misses = risen(before, await mesh.nodes(), "misses", "evicted")
    assert disturbed.text == undisturbed.text
    assert other_seed.text != undisturbed.text
    assert min(misses) >= 1


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_node_that_restarts_is_filled_again(mesh: Mesh, reference: Reference, hop: int) -> None:
    """Kill -9 in mid-stream and a new process at the same address: the sentence goes on with the same tokens."""
    expected = reference.greedy(PROMPT, MAX_TOKENS)
    node = mesh.fleet.nodes[hop]
    before = await mesh.nodes()

    async def restart() -> None:
        node.kill()
        node.start()

    streamed = await stream_chat(mesh.fleet, PROMPT, at_chunks(8, do=restart))
    after = await mesh.nodes()
    assert (streamed.text, streamed.finish_reason) == (expected.text, expected.finish_reason)
    assert after[hop]["pid"] == node.pid != before[hop]["pid"]
    before[hop] = {"steps": {}}
    assert risen(before, after, "steps", "prefill") == [1, 1, 1]


@pytest.mark.parametrize("how", ["killed", "stopped", "unreachable"])
async def test_a_node_lost_for_good_ends_the_stream_with_an_error(impatient_mesh: Mesh, how: str) -> None:
    """No node to fail over to: one error frame within the deadline, no finish reason, and the next answer is a 503."""
    mesh = impatient_mesh
    node = mesh.fleet.nodes[1]

    async def lose() -> None:
        if how == "killed":
            node.kill()
        elif how == "stopped":
            os.kill(node.pid, signal.SIGSTOP)
        else:
            mesh.proxies[1].stall()

    try:
        async with asyncio.timeout(FAILOVER_TIMEOUT_S + DETECTED_WITHIN_S):
            streamed = await stream_chat(mesh.fleet, PROMPT, at_chunks(8, do=lose))
        refused = await asyncio.to_thread(mesh.fleet.get, "/readyz")
        chat = await asyncio.to_thread(mesh.fleet.chat, PROMPT)
    finally:
        mesh.proxies[1].heal()
        if how == "stopped":
            os.kill(node.pid, signal.SIGCONT)
        elif how == "killed":
            node.start()
        await mesh.until_ready()
    assert streamed.finish_reason is None
    assert streamed.error is not None
    assert set(streamed.error) == {"message", "type", "param", "code"}
    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert chat.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert chat.headers["retry-after"]
    answer = await asyncio.to_thread(mesh.fleet.chat, PROMPT, max_tokens=4)
    assert answer.status_code == httpx.codes.OK


async def test_a_journal_that_is_full_replays_the_whole_route(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """With no room to remember hidden states, a lost cache in the middle is rebuilt from the token ids."""
    expected = reference.greedy(PROMPT, MAX_TOKENS)
    async with mesh_of(model, tmp_path, gateway_args=["--journal-max-bytes", "1"]) as mesh:
        before = await mesh.nodes()
        streamed = await stream_chat(mesh.fleet, PROMPT, at_chunks(8, do=lambda: mesh.evict_all(1)))
        prefills = risen(before, await mesh.nodes(), "steps", "prefill")
    assert streamed.text == expected.text
    assert prefills[:2] == [2, 2 + mesh.evictions]


@pytest.mark.parametrize("uncached", [[1], [0, 1, 2]])
async def test_nodes_without_a_cache_give_the_same_tokens(
    model: Path, reference: Reference, tmp_path: Path, uncached: list[int]
) -> None:
    """A hop without a cache is served all its positions at each step; cached hops beside it are not touched."""
    expected = reference.greedy(PROMPT, 24)
    node_args = {index: ["--no-kv-cache"] for index in uncached}
    async with mesh_of(model, tmp_path, node_args=node_args) as mesh:
        streamed = await stream_chat(mesh.fleet, PROMPT, max_tokens=24)
        nodes = await mesh.nodes()
    assert streamed.text == expected.text
    for index, node in enumerate(nodes):
        assert (node["steps"].get("decode", 0) == 0) is (index in uncached)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_compute_on_every_hop(mesh: Mesh, stream: bool) -> None:
    """Within a second of the client's leaving, no node holds its session or serves another step of it."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 1000,
        "temperature": 0,
        "stream": stream,
    }
    decodes = (await mesh.nodes())[2]["steps"].get("decode", 0)
    async with httpx.AsyncClient(timeout=60) as client:
        asking = asyncio.create_task(client.post(mesh.fleet.base_url + "/v1/chat/completions", json=body))
        async with asyncio.timeout(10):
            while (await mesh.nodes())[2]["steps"].get("decode", 0) < decodes + 5:
                await asyncio.sleep(0.02)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    await asyncio.sleep(RELEASED_WITHIN_S)
    before = await mesh.nodes()
    await asyncio.sleep(0.2)
    after = await mesh.nodes()
    assert risen(before, after, "steps", "decode") == [0, 0, 0]
    assert (await asyncio.to_thread(mesh.fleet.mesh))["gateway"]["active"] == 0


async def test_a_finished_generation_leaves_nothing_behind(impatient_mesh: Mesh, reference: Reference) -> None:
    """After the answer every hop has released its session, and a long prompt travelled in chunks."""
    content = PROMPT * 80
    expected = reference.greedy(content, 8)
    assert expected.prompt_tokens > 256
    before = await impatient_mesh.nodes()
    streamed = await stream_chat(impatient_mesh.fleet, content, max_tokens=8)
    await impatient_mesh.until_held([0, 0, 0], within_s=RELEASED_WITHIN_S + 1)
    after = await impatient_mesh.nodes()
    assert streamed.text == expected.text
    assert risen(before, after, "steps", "prefill") == [1, 1, 1]
    assert [node["kv_bytes"] for node in after] == [0, 0, 0]
