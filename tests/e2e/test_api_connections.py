"""What a connection may cost before anybody is asked for a key, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from gateway.http_protocol import HEAD_BYTES_MAX, HttpLimits
from gateway.request_record import REQUEST_ID
from tests.support.api_server import CALL_HEAD, ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.text_tokenizers import build_byte_level

HEAD_S = 0.5
CONNECTIONS_MAX = 12
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
JAVA = (
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    b"Upgrade: h2c\r\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all tests, with keys, and patience and room for tests."""
    model: Path = build_byte_level(tmp_path_factory.mktemp("model"))
    limits = HttpLimits(connections_max=CONNECTIONS_MAX, head_s=HEAD_S)
    with running_api(model, api_keys=("key",), http_limits=limits) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, which answers "fine"."""
    server.reset()
    server.answer_with("fine")
    server.http.headers["authorization"] = "Bearer key"
    return server


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    while received := connection.recv(65536):
        data += received
    return data


def refusal(answer: bytes, status: int) -> dict[str, Any]:
    """The error object of a response that ends its connection, checked for what holds for all."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1.1 %d " % status), answer[:200]
    headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"connection"] == b"close"
    assert REQUEST_ID.fullmatch(headers[b"x-request-id"])
    assert int(headers[b"content-length"]) == len(body)
    error = dict(json.loads(body)["error"])
    assert set(error) == {"message", "type", "param", "code"}
    return error


def java_call(api: ApiServer) -> tuple[bytes, bytes]:
    """Head and body of a chat completion as Java's client sends its first."""
    body = json.dumps(api.body(max_tokens=2)).encode()
    head = CALL_HEAD + JAVA + b"Authorization: Bearer key\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head, body


@pytest.mark.parametrize(
    ("start", "chunk", "status", "code"),
    [
        (GET + b"x: ", b"a" * 65536, 431, "headers_too_large"),
        (GET + b"x", b"a" * 65536, 431, "headers_too_large"),
        (GET, b"x-name: value\r\n" * 4000, 431, "headers_too_large"),
        (b"GET /", b"a" * 65536, 414, "url_too_long"),
        (b"GET /" + b"a" * 3 * HEAD_BYTES_MAX, b" HTTP/1.1\r\n\r\n", 414, "url_too_long"),
        (GET + b"x: " + b"a" * 3 * HEAD_BYTES_MAX, b"\r\n\r\n", 431, "headers_too_large"),
    ],
)
def test_a_head_without_end_is_refused(api: ApiServer, start: bytes, chunk: bytes, status: int, code: str):
    """Without a key, however it is cut, and the answer arrives though its sender goes on."""
    with api.connect() as connection:
        connection.sendall(start)
        for _ in range(8):
            connection.sendall(chunk)
        assert refusal(read_all(connection), status)["code"] == code


def test_a_head_within_the_limit_is_read(api: ApiServer):
    """The limit is the one that is named."""
    with api.connect() as connection:
        connection.sendall(GET + b"x: " + b"a" * (HEAD_BYTES_MAX - 100) + b"\r\nConnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_trailers_without_end_are_refused(api: ApiServer):
    """They are headers as well."""
    with api.connect() as connection:
        connection.sendall(CALL_HEAD + b"Authorization: Bearer key\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: ")
        connection.sendall(b"a" * 6 * HEAD_BYTES_MAX)
        assert refusal(read_all(connection), 431)["code"] == "headers_too_large"


@pytest.mark.parametrize("start", [b"GET /he", GET, GET + b"a: b"])
def test_a_head_that_does_not_arrive_is_refused(api: ApiServer, start: bytes):
    """After a while; drops of it do not buy more."""
    with api.connect() as connection:
        connection.sendall(start)
        assert refusal(read_all(connection), 408)["code"] == "request_timeout"


def test_a_silent_connection_is_closed(api: ApiServer):
    """There is nothing to answer."""
    with api.connect() as connection:
        assert read_all(connection) == b""


def test_a_later_head_on_a_connection_has_the_same_time(api: ApiServer):
    """Counted from its first byte; until then the connection may idle longer than that."""
    with api.connect() as connection:
        connection.sendall(GET + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.settimeout(2 * HEAD_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        connection.sendall(GET)
        assert refusal(read_all(connection), 408)["code"] == "request_timeout"


def test_half_a_head_does_not_cut_the_answer_before_it(api: ApiServer):
    """A pipelined request that is never finished ends the connection after what is owed."""
    release = asyncio.Event()
    ids = api.answer_with("fine")
    api.generator.script = lambda _request: [ids[0], release, *ids[1:]]
    head, body = java_call(api)
    with structlog.testing.capture_logs() as events, api.connect() as connection:
        connection.sendall(head + body + b"GET /v1")
        wait_until(lambda: any(event["event"] == "request.refused" for event in events), "the refusal")
        api.in_loop(release.set)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("cut", [False, True])
def test_a_wish_for_another_protocol_is_ignored(api: ApiServer, cut: bool):
    """Java's client offers HTTP/2 with each first POST: its body is read, wherever the packets are cut."""
    head, body = java_call(api)
    with api.connect() as connection:
        connection.sendall(head)
        if cut:
            time.sleep(0.05)  # a packet of its own
        connection.sendall(body + GET + b"Connection: close\r\n\r\n")
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    (request,) = api.generator.requests
    assert request.max_tokens == 2


def test_many_wishes_in_one_packet(api: ApiServer):
    """None of them costs a level of the stack."""
    with api.connect() as connection:
        wish = b"GET /healthz HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
        connection.sendall(wish * 1500 + GET + b"Connection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 1501


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GARBAGE\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x00\xff tls", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400, "bad_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
        (CALL_HEAD + b"Content-Length: -1\r\n\r\n", 400, "bad_request"),
        (CALL_HEAD + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n", 400, "bad_request"),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", 405, "method_not_allowed"),
    ],
)
def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(api: ApiServer, data: bytes, status: int, code: str):
    """With a request id that is in the log."""
    with structlog.testing.capture_logs() as events, api.connect() as connection:
        connection.sendall(data)
        answer = read_all(connection)
        assert refusal(answer, status)["code"] == code
    (event,) = [event for event in events if event["event"] == "request.refused"]
    assert event["request_id"].encode() in answer


def test_connections_over_the_limit_are_told_so(api: ApiServer):
    """One log line for all of them; when others close there is room again."""
    api.http.close()
    with structlog.testing.capture_logs() as events, ExitStack() as held:
        connections = [held.enter_context(api.connect()) for _ in range(CONNECTIONS_MAX)]
        for connection in connections:
            connection.sendall(GET + b"\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            with api.connect() as surplus:
                answer = read_all(surplus)
                assert refusal(answer, 503)["code"] == "too_many_connections"
                assert b"retry-after: 1\r\n" in answer
        connections[0].sendall(GET + b"\r\n")
        assert connections[0].recv(65536).startswith(b"HTTP/1.1 200 ")
    assert len([event for event in events if event["event"] == "connections.refused"]) == 1
    api.__post_init__()

    def has_room() -> bool:
        with api.connect() as connection:
            connection.sendall(GET + b"Connection: close\r\n\r\n")
            return read_all(connection).startswith(b"HTTP/1.1 200 ")

    wait_until(has_room, "room for a connection")
