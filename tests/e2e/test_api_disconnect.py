"""A client that leaves stops the work, whatever it was waiting for and however it left."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
import structlog.testing

from tests.support.api_server import CALL_HEAD, ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.scripted_generator import FOR_EVER
from tests.support.text_tokenizers import build_byte_level

NOTICED_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(build_byte_level(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> Iterator[ApiServer]:
    """The server, which answers normally afterwards."""
    server.reset()
    yield server
    server.generator.admission = []
    server.answer_with("fine")
    assert server.chat().json()["choices"][0]["message"]["content"] == "fine"


def close(connection: socket.socket) -> None:
    """FIN."""
    connection.close()


def reset(connection: socket.socket) -> None:
    """RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """No more requests will come; the connection stays open for reading."""
    connection.shutdown(socket.SHUT_WR)


LEAVING = pytest.mark.parametrize("leave", [close, reset, half_close])
MODES = pytest.mark.parametrize("stream", [False, True])


@LEAVING
@MODES
def test_leaving_in_the_middle_of_an_answer(api: ApiServer, leave: Callable[[socket.socket], None], stream: bool):
    """The generation is cancelled within a second, streaming or not."""
    api.generator.script = lambda _request: [74, 75, FOR_EVER()]
    connection = api.send_call(api.connect(), stream=stream)
    wait_until(lambda: api.generator.yielded == 2, "the generation to begin")
    if stream:
        assert b"200 OK" in connection.recv(65536)
    leave(connection)
    wait_until(lambda: api.generator.active == 0, "the end of the generation", NOTICED_S)
    assert api.generator.ends == ["cancelled"]
    connection.close()


@LEAVING
@MODES
def test_leaving_before_the_first_token(api: ApiServer, leave: Callable[[socket.socket], None], stream: bool):
    """During prefill, when nothing has been sent yet."""
    api.generator.script = lambda _request: [FOR_EVER()]
    connection = api.send_call(api.connect(), stream=stream)
    wait_until(lambda: api.generator.active == 1, "the generation to begin")
    leave(connection)
    wait_until(lambda: api.generator.active == 0, "the end of the generation", NOTICED_S)
    assert api.generator.ends == ["cancelled"]
    connection.close()


@MODES
def test_leaving_the_queue(api: ApiServer, stream: bool):
    """A call that waits for admission gives its place up."""
    api.generator.admission = [FOR_EVER()]
    connection = api.send_call(api.connect(), stream=stream)
    wait_until(lambda: api.generator.active == 1, "the call to wait")
    connection.close()
    wait_until(lambda: api.generator.active == 0, "the end of the wait", NOTICED_S)


@MODES
def test_leaving_a_generation_that_never_pauses(api: ApiServer, stream: bool):
    """Tokens that come faster than anything else do not hide that the client is gone."""
    api.generator.script = lambda _request: iter(lambda: 74, None)
    api.state.tokenizer.context_len = 10**9
    try:
        connection = api.send_call(api.connect(), stream=stream)
        wait_until(lambda: api.generator.yielded > 0, "the generation to begin")
        connection.close()
        wait_until(lambda: api.generator.active == 0, "the end of the generation", NOTICED_S)
    finally:
        api.state.tokenizer.context_len = 256


def test_leaving_in_the_middle_of_the_request(api: ApiServer):
    """Half a body, then nothing: no generation, no error in the log of a call that never was."""
    with structlog.testing.capture_logs() as events:
        connection = api.connect()
        connection.sendall(CALL_HEAD + b"Content-Length: 99\r\n\r\n{")
        connection.close()
        wait_until(lambda: any(event.get("status") == 499 for event in events), "the call's log line")
    (event,) = [event for event in events if event.get("status") == 499]
    assert (event["event"], event["client_left"]) == ("request.finished", "closed")
    assert not api.generator.requests


def test_many_leaving_at_once_leave_nothing_behind(api: ApiServer):
    """Fifty streams dropped at their first chunk."""
    release = asyncio.Event()
    api.generator.script = lambda _request: [74, release, 75, FOR_EVER()]
    connections = [api.send_call(api.connect(), stream=True) for _ in range(50)]
    wait_until(lambda: api.generator.yielded >= 50, "all streams to begin")
    api.in_loop(release.set)
    for connection in connections:
        connection.close()
    wait_until(lambda: api.generator.active == 0, "the end of all generations", NOTICED_S)
    assert set(api.generator.ends) == {"cancelled"}
