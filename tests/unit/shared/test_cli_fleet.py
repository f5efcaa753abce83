"""What `meshnet up` does with a process that ends: when it starts it again, where, and when no more."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from shared.cli import fleet as fleet_module
from shared.cli import restarts as restarts_module
from shared.cli.children import ChildFailed
from shared.cli.display import LineDisplay
from shared.cli.environment import given_api_keys, has_mesh_token, refuse_tls
from shared.cli.fleet import LocalFleet
from shared.cli.restarts import DELAY_MAX_S, ENDS_MAX, WINDOW_S, Restarts
from shared.layers import LayerRange
from shared.options import SettingError
from tests.unit.shared.test_cli_up import SETTINGS

LIVES = "import sys, time; print('listening on ws://' + sys.argv[1], flush=True); time.sleep(60)"
DIES = "import sys; print('listening on ws://' + sys.argv[1], flush=True); sys.exit('no reason')"


def test_delays_grow_and_stay_bounded():
    """Nothing is ever started again at once, nor later than the bound."""
    restarts = Restarts(Random(1))
    delays = [restarts.count_end(10.0 * index) for index in range(ENDS_MAX - 1)]
    assert all(delay is not None and 0.1 <= delay <= DELAY_MAX_S for delay in delays)
    assert delays == sorted(delays)


def test_five_ends_in_a_minute_are_the_last():
    """Just within the window; a moment more between them, and it goes on."""
    restarts = Restarts(Random(1))
    assert [restarts.count_end(WINDOW_S / (ENDS_MAX - 1) * index) for index in range(ENDS_MAX)][-1] is None
    spread = Restarts(Random(1))
    step_s = WINDOW_S / (ENDS_MAX - 1) + 0.1
    assert all(spread.count_end(step_s * index) is not None for index in range(50))


def test_a_long_life_is_forgiven():
    """After a quiet window the delay is the first one's again."""
    restarts = Restarts(Random(1))
    for index in range(ENDS_MAX - 1):
        last_s = restarts.count_end(float(index))
    again_s = restarts.count_end(3 * WINDOW_S)
    assert last_s is not None
    assert again_s is not None
    assert again_s < last_s
    assert restarts.recent == 1


class FakeCommands:
    """Stands in for the real commands: the first life of a node runs `first`, later ones `later`."""

    def __init__(self) -> None:
        self.first = LIVES
        self.later = LIVES
        self.listens: list[str] = []

    def node(self, *arguments: object) -> list[str]:
        """As `node_command`, whose last argument is where to listen."""
        listen = str(arguments[-1])
        self.listens.append(listen)
        is_first = listen.endswith(":0")
        return [sys.executable, "-c", self.first if is_first else self.later, "127.0.0.1:9" if is_first else listen]

    def gateway(self, *_: object) -> list[str]:
        """As `gateway_command`."""
        return [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """Processes without torch, and restarts without long waits."""
    fake = FakeCommands()
    monkeypatch.setattr(fleet_module, "node_command", fake.node)
    monkeypatch.setattr(fleet_module, "gateway_command", fake.gateway)
    monkeypatch.setattr(restarts_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(restarts_module, "DELAY_MAX_S", 0.01)
    return fake


@pytest_asyncio.fixture
async def said() -> list[str]:
    """What people are told."""
    return []


@pytest_asyncio.fixture
async def fleet(commands: FakeCommands, said: list[str]) -> AsyncIterator[LocalFleet]:
    """One node and one gateway, not yet started."""
    fleet = LocalFleet(SETTINGS, [LayerRange(0, 1)], 1, lambda _name, _line: None, said.append)
    yield fleet
    fleet.kill()
    await fleet.stop()


async def keep_running(fleet: LocalFleet) -> asyncio.Task[None]:
    """A started fleet that is being kept running."""
    await fleet.start(LineDisplay(io.StringIO()))

    async def forever() -> None:
        await asyncio.Event().wait()

    return asyncio.create_task(fleet.keep_running(forever()))


async def wait_for(said: list[str], count: int) -> None:
    """Wait until so many lines were said."""
    async with asyncio.timeout(20):
        while len(said) < count:
            await asyncio.sleep(0.01)


async def test_a_node_that_dies_is_started_again_where_it_was(
    fleet: LocalFleet, commands: FakeCommands, said: list[str]
):
    """On the port that the gateway knows; people are told why and how soon."""
    running = await keep_running(fleet)
    first = fleet.pid("node-0")
    fleet._children["node-0"].send(9)
    async with asyncio.timeout(20):
        while fleet.pid("node-0") == first:
            await asyncio.sleep(0.01)
    assert commands.listens == ["127.0.0.1:0", "127.0.0.1:9"]
    assert said[0].startswith("node-0 ended with signal SIGKILL; starting it again in 0.0 s (1 of 5 ends")
    assert not running.done()
    running.cancel()


async def test_a_node_that_will_not_live_ends_with_its_reason(
    fleet: LocalFleet, commands: FakeCommands, said: list[str]
):
    """Its last words, after four new starts."""
    commands.later = DIES
    running = await keep_running(fleet)
    fleet._children["node-0"].send(9)
    with pytest.raises(ChildFailed, match="node-0 ended 5 times within 60 s, the last time with exit code 1") as caught:
        await asyncio.wait_for(running, 20)
    assert "no reason" in caught.value.tail
    assert [line.split("(")[1][0] for line in said] == ["1", "2", "3", "4"]


async def test_a_gateway_that_dies_is_not_started_again(fleet: LocalFleet, said: list[str]):
    """Answers in the making are lost with it, so whoever watches must know."""
    running = await keep_running(fleet)
    fleet._children["gateway"].send(9)
    with pytest.raises(ChildFailed, match="gateway ended unexpectedly with signal SIGKILL"):
        await asyncio.wait_for(running, 20)
    assert said == []


async def test_before_it_serves_an_end_is_a_failure(fleet: LocalFleet, commands: FakeCommands, said: list[str]):
    """A wrong setting is said at once, not after five attempts."""
    commands.first = "raise SystemExit('a wrong setting')"
    with pytest.raises(ChildFailed, match="node-0 ended unexpectedly with exit code 1") as caught:
        await fleet.start(LineDisplay(io.StringIO()))
    assert list(caught.value.tail) == ["a wrong setting"]
    assert said == []


async def test_nothing_is_started_once_it_stops(
    fleet: LocalFleet, commands: FakeCommands, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    """A stop while a node waits for its new start ends that wait."""
    monkeypatch.setattr(restarts_module, "FIRST_DELAY_S", 30.0)
    monkeypatch.setattr(restarts_module, "DELAY_MAX_S", 30.0)
    running = await keep_running(fleet)
    fleet._children["node-0"].send(9)
    await wait_for(said, 1)
    running.cancel()
    await asyncio.wait_for(fleet.stop(), 10)
    assert len(commands.listens) == 1


async def test_a_node_is_not_told_the_api_keys(
    fleet: LocalFleet, commands: FakeCommands, monkeypatch: pytest.MonkeyPatch
):
    """Neither as a variable nor as a file's name; the gateway is, and both get the mesh's token."""
    monkeypatch.setenv("MESHNET_API_KEYS", "secret-key")
    monkeypatch.setenv("MESHNET_API_KEY_FILE", "/secret-file")
    monkeypatch.setenv("MESHNET_MESH_TOKEN", "mesh-token")
    await fleet.start(LineDisplay(io.StringIO()))
    seen = {name: read_environment(fleet.pid(name)) for name in ("gateway", "node-0")}
    assert b"secret-key" in seen["gateway"]
    assert b"secret-" not in seen["node-0"]
    assert all(b"mesh-token" in environment for environment in seen.values())


def read_environment(pid: int) -> bytes:
    """The variables that a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("variable", ["MESHNET_TLS_CERT", "MESHNET_TLS_KEY", "MESHNET_MESH_CLIENT_CA"])
def test_tls_on_one_machine_is_refused_by_name(variable: str):
    """Rather than ignored, or found out when nothing gets ready."""
    with pytest.raises(SettingError, match=f"{variable}: one machine's own fleet has no TLS"):
        refuse_tls({variable: "/some/file"})
    refuse_tls({variable: ""})


def test_keys_and_tokens_may_come_from_files(tmp_path: Path):
    """As gateway and nodes read them."""
    file = tmp_path / "keys"
    file.write_text("two\nthree\n")
    both = {"MESHNET_API_KEYS": "one", "MESHNET_API_KEY_FILE": str(file)}
    assert given_api_keys(both) == ("one", "two", "three")
    assert given_api_keys({}) == ()
    assert has_mesh_token({"MESHNET_MESH_TOKEN_FILE": str(file)})
    assert not has_mesh_token({"MESHNET_MESH_TOKEN": ""})
