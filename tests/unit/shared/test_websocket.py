"""Frames over real sockets on loopback: long frames, limits, closing, what is dialled and how."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin

from shared.errors import DeadlineExceeded, FrameError, LinkClosed
from shared.frame import FrameLimits
from shared.handshake import VERSIONS
from shared.layers import LayerRange
from shared.link import Link, accept, dial
from shared.link_state import HANDSHAKE_BYTES_MAX
from shared.messages import Heartbeat, Hello, Step, Welcome
from shared.tensor_spec import WireTensor
from shared.websocket import (
    CLOSE_TIMEOUT_S,
    FRAGMENT_BYTES_MAX,
    JOINED_BYTES_MAX,
    WebSocketTransport,
    cut_fragments,
    is_loopback,
    listen_options,
    websocket_options,
)
from tests.support.link_proxy import LinkProxy

HELLO = Hello(versions=VERSIONS, role="gateway", peer="g")
STEP = Step(session="s", step_index=0, layers=LayerRange(0, 1), model="m")
Use = Callable[[Link], Awaitable[None]]


async def echo(link: Link) -> None:
    """Send back whatever comes until the link closes."""
    with contextlib.suppress(LinkClosed):
        while True:
            await link.send(*await link.receive())


@contextlib.asynccontextmanager
async def listening(use: Use, limits: FrameLimits | None = None) -> AsyncIterator[int]:
    """A node on a port of the kernel's choice that does `use` with each link."""
    limits = limits or FrameLimits()

    async def handle(connection: ServerConnection) -> None:
        transport = WebSocketTransport(connection)
        await use(await accept(transport, answer=lambda _: Welcome(version=1, peer="n"), limits=limits))

    async with serve(handle, "127.0.0.1", 0, **listen_options(limits)) as server:
        yield server.sockets[0].getsockname()[1]


def url(port: int) -> str:
    """A listener's address."""
    return f"ws://127.0.0.1:{port}"


@pytest.mark.parametrize("size", [0, 1, JOINED_BYTES_MAX, 2 * FRAGMENT_BYTES_MAX + 1])
async def test_frames_of_every_length_come_back_as_they_were(size: int):
    """Joined or cut into fragments, the tensor's bytes are the same at the other end, and back."""
    tensor = WireTensor("u8", (size,), memoryview(os.urandom(size)))
    async with listening(echo) as port:
        link = await dial(url(port), HELLO)
        await link.send(STEP, {"x": tensor})
        message, tensors = await link.receive()
        await link.close()
    assert message == STEP
    assert tensors == {"x": tensor}


async def test_senders_do_not_tear_each_others_frames():
    """Long and short frames sent by many tasks at once all arrive whole."""
    long = {"x": WireTensor("u8", (3 * FRAGMENT_BYTES_MAX,), memoryview(bytes(3 * FRAGMENT_BYTES_MAX)))}
    async with listening(echo) as port:
        link = await dial(url(port), HELLO)

        async def read() -> list[int]:
            return [len((await link.receive())[1]) for _ in range(12)]

        reading = asyncio.create_task(read())
        await asyncio.gather(*(link.send(STEP, long if i % 3 == 0 else None) for i in range(12)))
        assert sorted(await reading) == [0] * 8 + [1] * 4
        await link.close()


async def test_a_short_frame_leaves_at_once_and_never_before_one_that_waits():
    """Sent without waiting while the link is idle; refused, with nothing done, behind a long frame or once closed."""
    tensor = WireTensor("u8", (4096,), memoryview(os.urandom(4096)))
    long = WireTensor("u8", (8 * FRAGMENT_BYTES_MAX,), memoryview(bytes(8 * FRAGMENT_BYTES_MAX)))
    async with listening(echo) as port:
        link = await dial(url(port), HELLO)
        assert link.send_now(STEP, {"x": tensor})
        assert await link.receive() == (STEP, {"x": tensor})
        assert link.counters.sent_frames["step"] == 1
        assert not link.send_now(STEP, {"x": long})
        sending = asyncio.create_task(link.send(STEP, {"x": long}))
        await asyncio.sleep(0)
        assert not link.send_now(Heartbeat(seq=1))
        await link.receive()
        await sending
        await link.close()
        assert not link.send_now(Heartbeat(seq=2))
    assert link.counters.sent_frames == {"hello": 1, "step": 2}


async def test_a_cancelled_long_frame_still_leaves_whole():
    """Cancelling a sender between two fragments does not spoil the link for the next one."""
    size = 8 * FRAGMENT_BYTES_MAX
    async with listening(echo) as port:
        link = await dial(url(port), HELLO)
        sending = asyncio.create_task(link.send(STEP, {"x": WireTensor("u8", (size,), memoryview(bytes(size)))}))
        await asyncio.sleep(0)
        assert not sending.done()
        sending.cancel()
        await link.send(Heartbeat(seq=1))
        assert (await link.receive())[0] == STEP
        assert (await link.receive())[0] == Heartbeat(seq=1)
        await link.close()


async def test_fragments_are_views_of_the_pieces():
    """Cutting copies nothing, leaves nothing out and makes no empty fragment."""
    data = bytearray(os.urandom(2 * FRAGMENT_BYTES_MAX + 10))
    fragments = list(cut_fragments([b"head", memoryview(data), b""]))
    assert b"".join(fragments) == b"head" + data
    assert [len(fragment) for fragment in fragments] == [4, FRAGMENT_BYTES_MAX, FRAGMENT_BYTES_MAX, 10]
    assert fragments[1].obj is data


async def test_a_frame_over_the_receivers_limit_closes_the_link():
    """A receiver with a smaller limit never buffers the frame; both sides learn why."""
    seen: asyncio.Future[LinkClosed] = asyncio.get_running_loop().create_future()

    async def read(link: Link) -> None:
        with pytest.raises(LinkClosed) as caught:
            await link.receive()
        seen.set_result(caught.value)

    size = 400_000
    async with listening(read, FrameLimits(payload_bytes_max=1000)) as port:
        link = await dial(url(port), HELLO)
        with contextlib.suppress(LinkClosed):
            await link.send(STEP, {"x": WireTensor("u8", (size,), memoryview(bytes(size)))})
        with pytest.raises(LinkClosed) as told:
            await link.receive()
    assert told.value.code == (await seen).code == "frame_too_large"


async def test_nothing_long_is_buffered_for_who_has_not_shown_a_token():
    """A server's connection takes `HANDSHAKE_BYTES_MAX` at once before the welcome, the link's limit after it."""
    seen: asyncio.Future[LinkClosed] = asyncio.get_running_loop().create_future()

    async def handle(connection: ServerConnection) -> None:
        with pytest.raises(LinkClosed) as caught:
            await accept(WebSocketTransport(connection), answer=lambda _: Welcome(version=1, peer="n"))
        seen.set_result(caught.value)

    async with (
        serve(handle, "127.0.0.1", 0, **websocket_options()) as server,
        connect(url(server.sockets[0].getsockname()[1]), proxy=None) as client,
    ):
        with contextlib.suppress(ConnectionClosed):
            await client.send(bytes(HANDSHAKE_BYTES_MAX + 1))
        assert (await seen).code == "frame_too_large"


async def test_a_page_in_a_browser_cannot_open_a_link():
    """A request that names an origin is refused before anything is read, whatever the origin."""

    async def handle(_connection: ServerConnection) -> None:
        raise AssertionError("a browser got in")

    async with serve(handle, "127.0.0.1", 0, **listen_options()) as server:
        port = server.sockets[0].getsockname()[1]
        for origin in ("null", "https://evil.example", f"http://127.0.0.1:{port}"):
            with pytest.raises(InvalidStatus) as caught:
                await connect(url(port), proxy=None, origin=Origin(origin))
            assert caught.value.response.status_code == HTTPStatus.FORBIDDEN


async def test_a_text_message_is_no_frame():
    """Text ends the link with a typed error."""
    seen: asyncio.Future[FrameError] = asyncio.get_running_loop().create_future()

    async def handle(connection: ServerConnection) -> None:
        with pytest.raises(FrameError) as caught:
            await accept(WebSocketTransport(connection), answer=lambda _: Welcome(version=1, peer="n"))
        seen.set_result(caught.value)

    async with (
        serve(handle, "127.0.0.1", 0, **websocket_options()) as server,
        connect(url(server.sockets[0].getsockname()[1]), proxy=None) as client,
    ):
        await client.send("hello")
        assert (await seen).code == "not_binary"


async def test_nagle_is_off_on_both_sides():
    """A small frame does not wait for the acknowledgement of the one before."""
    flags: list[int] = []

    def note(connection: ServerConnection | None) -> None:
        assert connection is not None
        sock: socket.socket = connection.transport.get_extra_info("socket")
        flags.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def handle(connection: ServerConnection) -> None:
        note(connection)

    async with serve(handle, "127.0.0.1", 0, **websocket_options()) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(url(port), proxy=None, **websocket_options()) as client:
            note(client)  # type: ignore[arg-type]
            await client.wait_closed()
    assert flags == [1, 1]


@pytest.mark.parametrize(
    ("address", "code"),
    [("http://127.0.0.1:1", "bad_url"), ("nonsense", "bad_url"), ("ws://127.0.0.1:1", "unreachable")],
)
async def test_what_cannot_be_dialled_says_why(address: str, code: str):
    """A wrong address and a closed port are `LinkClosed`, never something of the library's own."""
    with pytest.raises(LinkClosed) as caught:
        await dial(address, HELLO)
    assert caught.value.code == code


async def test_something_else_that_answers_is_no_peer():
    """A web server that refuses the upgrade, and a listener that talks no HTTP, are told apart from a node."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp ready\r\n")
        writer.close()

    for serve_client, code in ((refuse, "http_status"), (babble, "unreachable")):
        async with await asyncio.start_server(serve_client, "127.0.0.1", 0) as server:
            with pytest.raises(LinkClosed) as caught:
                await dial(url(server.sockets[0].getsockname()[1]), HELLO)
        assert caught.value.code == code


async def test_a_redirect_is_not_followed():
    """The mesh token is for the configured address: whoever answers there cannot send it elsewhere."""
    dialled: list[str] = []

    async def elsewhere(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append("elsewhere")
        writer.close()

    async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as target:
        port = target.sockets[0].getsockname()[1]
        for location in (f"ws://127.0.0.1:{port}/", "ws://a..b/", "", "//x:99999999/"):

            async def redirect(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, location: str = location
            ) -> None:
                await reader.readuntil(b"\r\n\r\n")
                head = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
                writer.write(head.encode())
                writer.close()

            async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
                with pytest.raises(LinkClosed, match="http_status"):
                    await dial(url(server.sockets[0].getsockname()[1]), HELLO)
    assert dialled == []


@pytest.mark.parametrize("error", [AssertionError(), UnicodeError("label empty"), ValueError("port")])
async def test_whatever_the_library_raises_while_dialling_is_a_closed_link(
    monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """A listener that speaks first meets an assertion inside `websockets`; no answer may raise anything else here."""

    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("shared.websocket._Dial", fail)
    with pytest.raises(LinkClosed, match="unreachable"):
        await dial("ws://127.0.0.1:1", HELLO)


async def test_a_stalled_network_ends_no_later_than_the_deadlines():
    """Dialling through a proxy that passes nothing ends at its deadline; so does closing an open link."""
    loop = asyncio.get_running_loop()
    async with listening(echo) as port, LinkProxy(port).run() as proxy:
        link = await dial(proxy.url, HELLO)
        proxy.stall()
        with pytest.raises(DeadlineExceeded):
            await dial(proxy.url, HELLO, timeout_s=0.05)
        started_s = loop.time()
        await link.close()
        assert loop.time() - started_s < CLOSE_TIMEOUT_S + 1.0
        with pytest.raises(LinkClosed):
            await link.receive()


async def test_a_reset_connection_is_noticed_at_once():
    """The proxy's cut wakes a waiting reader with `connection_lost`."""
    async with listening(echo) as port, LinkProxy(port).run() as proxy:
        link = await dial(proxy.url, HELLO)
        waiting = asyncio.create_task(link.receive())
        await link.send(Heartbeat(seq=1))
        await waiting
        waiting = asyncio.create_task(link.receive())
        await asyncio.sleep(0)
        proxy.cut()
        with pytest.raises(LinkClosed) as caught:
            await waiting
    assert caught.value.code == "connection_lost"


async def test_the_proxy_delays_and_heals():
    """A delayed frame takes at least its delay; what was kept while stalled arrives after healing."""
    loop = asyncio.get_running_loop()
    async with listening(echo) as port, LinkProxy(port).run() as proxy:
        link = await dial(proxy.url, HELLO)
        proxy.delay_s["there"] = 0.05
        started_s = loop.time()
        await link.send(Heartbeat(seq=1))
        await link.receive()
        assert loop.time() - started_s >= 0.05
        proxy.delay_s["there"] = 0.0
        proxy.stall("back")
        await link.send(Heartbeat(seq=2))
        waiting = asyncio.create_task(link.receive())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.02)
        proxy.heal()
        assert (await waiting)[0] == Heartbeat(seq=2)
        await link.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("ws://127.0.0.1:9", True), ("ws://localhost/", True), ("ws://[::1]:9", True), ("ws://10.0.0.1:9", False)],
)
def test_a_proxy_from_the_environment_is_not_used_on_loopback(address: str, expected: bool):
    """An address on this machine is dialled directly, others as the environment says."""
    assert is_loopback(address) is expected
