"""Two gateways over the same nodes do not disturb each other.

Two real nodes of a tiny model in float32 with four places each, and callers of both gateways who want more than those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import TinyModels
from tests.support.fleet import Fleet, ManagedProcess, child_env, free_port, running_fleet, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PLACES = 4
CALLS = 6
MAX_TOKENS = 12


@pytest.fixture
def gateways(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Fleet]]:
    """Two gateways of the same two nodes."""
    folder, ports = tmp_path_factory.mktemp("two-gateways"), [free_port(), free_port()]
    places = ["--kv-max-sessions", str(PLACES)]
    with running_fleet(
        tiny_model("qwen2"), ["0:3", "3:6"], folder, node_args={0: places, 1: places}, node_ports=ports
    ) as first:
        port = free_port()
        command = [sys.executable, "-m", "gateway", "--model", str(tiny_model("qwen2")), "--port", str(port)]
        for node_port in ports:
            command += ["--node", f"ws://127.0.0.1:{node_port}"]
        process = ManagedProcess("gateway-2", [*command, "--exit-with-parent"], folder / "gateway-2.log", child_env())
        try:
            second = Fleet(f"http://127.0.0.1:{port}", process, first.nodes)
            second.wait_ready()
            yield first, second
        finally:
            process.stop()


def answer(fleet: Fleet, number: int) -> str:
    """One greedy answer."""
    response = fleet.chat(f"call {number}", max_tokens=MAX_TOKENS, temperature=0)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def evictions(fleet: Fleet) -> int:
    """Sessions that nodes have dropped for want of room."""
    return sum(node["evictions"].get("evicted", 0) for node in fleet.mesh()["nodes"])


def test_callers_of_both_get_their_own_answers_and_no_session_is_evicted(gateways: tuple[Fleet, Fleet]):
    """Twice as many at once as there are places: each gateway keeps to what nodes grant it, and waits with the rest."""
    first, second = gateways
    alone = [answer(first, number) for number in range(CALLS)]
    wait_until(lambda: all(node["sessions"] == 0 for node in first.mesh()["nodes"]), "the end of all sessions")
    with ThreadPoolExecutor(2 * CALLS) as callers:
        jobs = [callers.submit(answer, fleet, number) for number in range(CALLS) for fleet in (first, second)]
        assert [job.result() for job in jobs] == [text for text in alone for _ in (first, second)]
    assert evictions(first) == evictions(second) == 0
    for fleet in gateways:
        assert not [miss for node in fleet.mesh()["nodes"] for miss in node["misses"].values() if miss]
