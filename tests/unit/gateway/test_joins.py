"""Nodes that dial the gateway: over real sockets the handshake and its limits, in memory whose id is whose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from litestar import Litestar
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.join_rules import JOINS_PER_ADDRESS_MAX, QUIET_S, REPLACED_EVERY_S, UNPROVEN_MAX
from gateway.joins import AWAY_CHECKED_EVERY_S, AWAY_S, JOINED_MAX, Joins
from gateway.link_listener import LinkListener
from gateway.mesh import Mesh
from gateway.server import create_server, listen
from shared.clock import SystemClock
from shared.errors import HandshakeRefused, LinkClosed
from shared.frame import DEFAULT_LIMITS
from shared.handshake import VERSIONS
from shared.layers import LayerRange
from shared.link import Link, dial
from shared.link_state import HANDSHAKE_BYTES_MAX
from shared.mesh_access import MeshAccess
from shared.mesh_tokens import MeshTokens
from shared.messages import Heartbeat, Hello, MachineInfo, NodeInfo, Step, StepResult
from shared.tensor_spec import WireTensor
from tests.support.memory_mesh import NUM_LAYERS, ScriptedMesh, expected, idle, scripted_mesh
from tests.support.scripted_joiner import JoiningNode, create_joining
from tests.support.scripted_node import MODEL

INFO = NodeInfo(node="n", pid=7, model=MODEL, layers=LayerRange(0, 2), num_layers=2, state="ready")
MACHINE = MachineInfo(memory_bytes=1, read_bytes_per_s=1)
HELLO = Hello(versions=VERSIONS, role="node", peer="n", token="t", node=INFO)


@dataclass
class Gateway:
    """What a test dials."""

    url: str
    mesh: Mesh
    listener: LinkListener

    async def until_known(self, count: int = 1) -> None:
        """Wait until so many nodes are connected."""
        async with asyncio.timeout(5):
            while len(self.mesh.nodes()) < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(**options: Any) -> AsyncIterator[Gateway]:
    """A real server on loopback that takes nodes."""
    mesh, clock = Mesh(), SystemClock()
    joins = Joins(
        mesh,
        **{
            "gateway_id": "g",
            "model": MODEL,
            "access": MeshAccess(tokens=MeshTokens(["t"])),
            "clock": clock,
            **options,
        },
    )
    links = LinkListener(joins, clock=clock)
    socket = listen("127.0.0.1", 0)
    server = create_server(Litestar([], openapi_config=None), drain_s=1, links=links)
    serving = asyncio.create_task(server.serve(sockets=[socket]))
    try:
        yield Gateway(f"ws://127.0.0.1:{socket.getsockname()[1]}/mesh", mesh, links)
    finally:
        await links.close()
        server.should_exit = True
        await serving


async def answer(link: Link) -> None:
    """Answer heartbeats, and steps with what they carry."""
    while True:
        message, tensors = await link.receive()
        if isinstance(message, Heartbeat) and not message.reply:
            await link.send(Heartbeat(seq=message.seq, reply=True))
        elif isinstance(message, Step):
            await link.send(StepResult(session=message.session, step_index=message.step_index), tensors)


async def test_a_node_that_joins_serves_steps_as_one_that_is_dialled() -> None:
    """Its frames may be as long, once it has shown its token."""
    async with gateway() as near:
        link = await dial(near.url, HELLO)
        answering = asyncio.create_task(answer(link))
        await near.until_known()
        payload = WireTensor(
            "u8", (HANDSHAKE_BYTES_MAX * 4,), memoryview(bytes(range(256)) * (HANDSHAKE_BYTES_MAX // 64))
        )
        node = near.mesh.link("n")
        assert node is not None
        step = Step(session="s", step_index=0, layers=INFO.layers, model=MODEL)
        _, tensors = await node.ask(step, {"hidden_states": payload})
        assert bytes(tensors["hidden_states"].data) == bytes(payload.data)
        assert node.joined
        await link.close()
        with pytest.raises(LinkClosed):
            await answering


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        pytest.param(replace(HELLO, token="wrong"), "unauthorized", id="wrong token"),
        pytest.param(replace(HELLO, token=None), "unauthorized", id="no token"),
        pytest.param(replace(HELLO, versions=(99,)), "version_mismatch", id="version"),
        pytest.param(replace(HELLO, role="gateway"), "wrong_role", id="another gateway"),
        pytest.param(replace(HELLO, node=None), "nothing_offered", id="neither range nor machine"),
        pytest.param(replace(HELLO, peer="m"), "id_mismatch", id="two ids"),
        pytest.param(replace(HELLO, node=replace(INFO, model="other")), "model_mismatch", id="another model"),
        pytest.param(replace(HELLO, node=None, machine=MACHINE, model="other"), "model_mismatch", id="expects another"),
    ],
)
async def test_who_is_refused_is_told_why(hello: Hello, code: str) -> None:
    """And is not known afterwards."""
    async with gateway() as near:
        with pytest.raises(HandshakeRefused) as refused:
            await dial(near.url, hello)
        assert refused.value.code == code
        assert near.mesh.links == []


async def test_before_the_token_a_frame_is_short() -> None:
    """What is longer ends the connection without having been kept."""
    assert DEFAULT_LIMITS.frame_bytes_max > HANDSHAKE_BYTES_MAX
    async with gateway() as near, connect(near.url, compression=None) as raw:
        await raw.send(bytes(HANDSHAKE_BYTES_MAX + 1))
        with pytest.raises(ConnectionClosed):
            await raw.recv()
        assert raw.close_code == 1009


async def test_who_says_nothing_is_let_go() -> None:
    """A connection without a token is not kept for long."""
    async with gateway(handshake_s=0.05) as near, connect(near.url, compression=None) as raw:
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(raw.recv(), 2)


async def test_silent_connections_are_bounded() -> None:
    """One more is refused while it is still HTTP, and taken once one of them has gone."""
    async with gateway() as near:
        silent = [await connect(near.url, compression=None) for _ in range(UNPROVEN_MAX)]
        with pytest.raises(LinkClosed, match="503"):
            await dial(near.url, HELLO)
        await silent.pop().close()
        async with asyncio.timeout(5):
            while near.mesh.links == []:
                try:
                    link = await dial(near.url, HELLO)
                except LinkClosed:
                    await asyncio.sleep(0.01)
        await link.close()
        await asyncio.gather(*(raw.close() for raw in silent))


async def test_attempts_of_an_address_are_bounded() -> None:
    """A node in a loop does not keep the gateway busy."""
    async with gateway() as near:
        for _ in range(JOINS_PER_ADDRESS_MAX):
            assert near.listener.refusal("127.0.0.1") is None
            near.listener._gate.leave()
        with pytest.raises(LinkClosed, match="429"):
            await dial(near.url, HELLO)


async def test_no_page_in_a_browser_opens_a_link() -> None:
    """A browser names the page that it is on."""
    async with gateway() as near:
        with pytest.raises(InvalidStatus) as refused:
            await connect(near.url, origin="http://evil.example")  # type: ignore[arg-type]
        assert refused.value.response.status_code == 403


@pytest.mark.parametrize("path", ["/mesh", "/other"])
async def test_no_other_request_becomes_a_link(path: str) -> None:
    """A plain request is HTTP as ever, and so is a wish for a WebSocket elsewhere."""
    async with gateway() as near, httpx.AsyncClient() as http:
        url = near.url.replace("ws:", "http:").replace("/mesh", path)
        upgrade = {} if path == "/mesh" else {"connection": "upgrade", "upgrade": "websocket"}
        assert (await http.get(url, headers=upgrade)).status_code == 404


async def test_a_gateway_that_ends_takes_no_more() -> None:
    """And closes what is open."""
    async with gateway() as near:
        link = await dial(near.url, HELLO)
        await near.until_known()
        await near.listener.close()
        with pytest.raises(LinkClosed):
            await answer(link)
        with pytest.raises(LinkClosed, match="503"):
            await dial(near.url, HELLO)


# --- in memory ------------------------------------------------------------------------------------


def create_joins(mesh: ScriptedMesh) -> Joins:
    """The joins of a scripted mesh."""
    return Joins(mesh.mesh, gateway_id="gateway", model=MODEL, access=MeshAccess(), clock=mesh.clock)


def fixed(mesh: ScriptedMesh, node_id: str, layers: str, **options: Any) -> JoiningNode:
    """A node that joins with a range of its own."""
    node = create_joining(node_id, NUM_LAYERS, mesh.clock, machine=None, holds=True, **options)
    node.layers = LayerRange.parse(layers)
    mesh.nodes.append(node)
    return node


async def test_joined_nodes_take_part_in_routes() -> None:
    """Two that are dialled and one that joins."""
    async with scripted_mesh(["0:2", "2:4"]) as mesh:
        fixed(mesh, "j", "4:6").join(create_joins(mesh))
        await mesh.until(mesh.view.ready)
        assert await mesh.drive(mesh.generate()) == expected()
        await idle()
        mesh.assert_nothing_left()


async def test_one_that_comes_back_is_itself_again() -> None:
    """A stream waits for it meanwhile, and its tokens are the same."""
    async with scripted_mesh(["0:2", "2:4"]) as mesh:
        node = fixed(mesh, "j", "4:6")
        node.join(create_joins(mesh))
        await mesh.until(mesh.view.ready)
        async with mesh.generator.generation(mesh.request()) as tokens:
            seen = [(await mesh.drive(anext(tokens))).id for _ in range(3)]
            node.cut()
            seen += [(await mesh.drive(anext(tokens))).id for _ in range(5)]
        assert seen == expected()
        assert [link.node for link in mesh.mesh.links] == ["a", "b", "j"]
        assert mesh.mesh.links[-1].connects == 2


async def test_one_that_stays_away_is_forgotten_in_the_end() -> None:
    """Until then it is shown as away."""
    async with scripted_mesh(["0:2", "2:4"]) as mesh:
        joins = create_joins(mesh)
        node = fixed(mesh, "j", "4:6")
        node.join(joins)
        await mesh.until(mesh.view.ready)
        forgetting = asyncio.create_task(joins.run())
        node.stop()
        await mesh.drive(mesh.clock.sleep(AWAY_S - 1))
        assert [figures["state"] for figures in mesh.view.snapshot()["nodes"]] == ["ready", "ready", "away"]
        await mesh.drive(mesh.clock.sleep(AWAY_CHECKED_EVERY_S + 1))
        assert [link.node for link in mesh.mesh.links] == ["a", "b"]
        forgetting.cancel()


async def test_the_same_process_takes_its_id_over() -> None:
    """It has lost a link that the gateway still takes for a good one; the old link is closed as replaced."""
    async with scripted_mesh([]) as mesh:
        joins = create_joins(mesh)
        node = fixed(mesh, "j", "0:6")
        node.join(joins)
        await mesh.until(mesh.view.ready)
        await mesh.drive(mesh.clock.sleep(REPLACED_EVERY_S))
        twin = fixed(mesh, "j", "0:6")
        twin.join(joins)
        await mesh.until(lambda: len(twin.links) == 1 and twin.refusals == [] and mesh.mesh.links[0].connects == 2)
        assert node.links[0].is_closed
        assert len(mesh.mesh.links) == 1


@pytest.mark.parametrize("other", [{"host": "10.0.0.2"}, {"pid": 4711}], ids=["another machine", "another process"])
async def test_two_live_machines_of_one_id_do_not_take_it_from_each_other(other: dict[str, Any]) -> None:
    """The one that has it keeps it; the other is refused however often it comes."""
    async with scripted_mesh([]) as mesh:
        joins = create_joins(mesh)
        first = fixed(mesh, "j", "0:6")
        first.join(joins)
        await mesh.until(mesh.view.ready)
        second = fixed(mesh, "j", "0:6", **other)
        second.join(joins)
        await mesh.drive(mesh.clock.sleep(60.0))
        assert set(second.refusals) == {"duplicate_node"}
        assert mesh.mesh.links[0].connects == 1
        first.stop()
        await mesh.until(lambda: mesh.mesh.links[0].connects == 2)
        assert mesh.mesh.links[0].info is not None
        assert mesh.mesh.links[0].info.pid == second.pid


async def test_a_silent_one_gives_way_before_it_is_given_up() -> None:
    """Its machine has lost power and another takes its place."""
    async with scripted_mesh([]) as mesh:
        joins = create_joins(mesh)
        first = fixed(mesh, "j", "0:6")
        first.join(joins)
        await mesh.until(mesh.view.ready)
        first.stalled = True
        await mesh.drive(mesh.clock.sleep(QUIET_S + 0.5))
        assert mesh.mesh.links[0].is_open
        second = fixed(mesh, "j", "0:6", host="10.0.0.2")
        second.join(joins)
        await idle()
        assert second.refusals == []
        assert mesh.mesh.links[0].connects == 2


async def test_one_that_is_dialled_keeps_its_id() -> None:
    """Taken from it, it would be dialled again at once."""
    async with scripted_mesh(["0:6"]) as mesh:
        joins = create_joins(mesh)
        twin = fixed(mesh, "a", "0:6", pid=mesh.nodes[0].pid)
        twin.join(joins)
        await mesh.drive(mesh.clock.sleep(2 * REPLACED_EVERY_S))
        assert set(twin.refusals) == {"duplicate_node"}
        mesh.nodes[0].stop()
        await mesh.until(lambda: twin.links[-1].is_closed is False and mesh.view.ready())


async def test_known_nodes_are_bounded() -> None:
    """Ids are the joiner's own choice, and each is remembered for a while."""
    async with scripted_mesh([]) as mesh:
        joins = create_joins(mesh)
        for number in range(JOINED_MAX + 1):
            fixed(mesh, f"n{number}", "0:6").join(joins)
        await idle()
        assert len(mesh.mesh.links) == JOINED_MAX
        assert mesh.nodes[-1].refusals == ["too_many_nodes"]
