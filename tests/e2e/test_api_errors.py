"""Everything that a caller can get wrong, over real HTTP: right status, OpenAI's shape, a server that goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog.testing

from tests.support.api_server import CALL_HEAD, ApiServer, running_api
from tests.support.text_tokenizers import build_byte_level

BODY_BYTES_MAX = 100_000
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    return build_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(model, body_bytes_max=BODY_BYTES_MAX) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> Iterator[ApiServer]:
    """The server, which after whatever a test did to it still answers."""
    server.reset()
    server.answer_with("fine")
    yield server
    server.answer_with("fine")
    assert server.chat().json()["choices"][0]["message"]["content"] == "fine"


@pytest.fixture(scope="module")
def keyed(model: Path) -> Iterator[ApiServer]:
    """A server with API keys."""
    with running_api(model, api_keys=("one", "two")) as server:
        yield server


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, checked for everything that holds for all errors."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert set(response.json()) == {"error"}
    error = dict(response.json()["error"])
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b'{"model": "m", "messages": [', b'{"temperature": NaN}', b'{"a": 1e999}', b'{"a": "\\udc00"}',
        b'{"a": "\xff\xfe"}', b"[1]", b"[" * 50_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b"\x00\x01",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_a_400(api: ApiServer, content: bytes):
    """Truncated, not UTF-8, nested beyond reason."""
    response = api.http.post("/v1/chat/completions", content=content, headers=JSON)
    assert error_of(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("escape", [r"\ud800", r"\ud83dx", r"\udc00"])
def test_half_a_surrogate_pair_is_named(api: ApiServer, escape: str):
    """It is whole JSON: nothing was truncated."""
    content = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]}' % escape.encode()
    response = api.http.post("/v1/chat/completions", content=content, headers=JSON)
    error = error_of(response, 400)
    assert error["code"] == "invalid_json"
    assert f"{escape[:6]} at byte 57 is half of a surrogate pair" in error["message"]


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "x"}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_k": -2}, "top_k"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_parameter_is_a_400_that_names_it(api: ApiServer, parameters: dict[str, Any], param: str, stream: bool):
    """Also when a stream was asked for: nothing has been streamed yet."""
    assert error_of(api.chat(**parameters, stream=stream), 400)["param"] == param
    assert not api.generator.requests


def test_the_sdk_raises_its_typed_errors(api: ApiServer):
    """With code, param and request id where its users look for them."""
    client = api.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**api.body(top_logprobs=5))
    assert (bad.value.param, bad.value.code) == ("top_logprobs", "invalid_value")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(**api.body(model="gpt-5"))
    assert absent.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_only_json_is_read(api: ApiServer, content_type: str, status: int):
    """A form post from a foreign page is none."""
    content = json.dumps(api.body()).encode()
    response = api.http.post("/v1/chat/completions", content=content, headers={"content-type": content_type})
    assert response.status_code == status
    if status != 200:
        assert error_of(response, status)["code"] == "unsupported_content_type"


def test_a_body_over_the_limit_is_a_413(api: ApiServer):
    """Announced or not, and whatever it holds."""
    big = json.dumps(api.body(user="x" * BODY_BYTES_MAX)).encode()
    response = api.http.post("/v1/chat/completions", content=big, headers=JSON)
    assert error_of(response, 413)["code"] == "request_too_large"
    chunked = api.http.post("/v1/chat/completions", content=iter([big[:1000], big[1000:]]), headers=JSON)
    assert error_of(chunked, 413)["code"] == "request_too_large"


def test_a_body_just_under_the_limit_is_read(api: ApiServer):
    """The limit is the one that is named."""
    empty = len(json.dumps(api.body(user="")).encode())
    body = json.dumps(api.body(user="x" * (BODY_BYTES_MAX - empty))).encode()
    assert len(body) == BODY_BYTES_MAX
    assert api.http.post("/v1/chat/completions", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/images", 404, "unknown_url"),
        ("GET", "/v1/chat/completions/x", 404, "unknown_url"),
        ("GET", "/v1/%ff%00", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PATCH", "/healthz", 405, "method_not_allowed"),
    ],
)
def test_unknown_urls_and_methods(api: ApiServer, method: str, path: str, status: int, code: str):
    """In the same shape, and a 405 says what is allowed."""
    response = api.http.request(method, path)
    assert error_of(response, status)["code"] == code
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/readyz", "/mesh", "/nothing"])
def test_head_is_get_without_a_body(api: ApiServer, path: str):
    """Same status, same headers."""
    head, get = api.http.head(path), api.http.get(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


def test_options_answers_with_what_is_allowed(api: ApiServer):
    """Without being a preflight."""
    response = api.http.options("/v1/models")
    assert response.status_code == 204
    assert "GET" in response.headers["allow"]


def test_every_response_has_a_request_id_and_a_sane_one_is_echoed(api: ApiServer):
    """Success, error, stream."""
    for request in (
        ("GET", "/healthz", None),
        ("GET", "/no", None),
        ("POST", "/v1/chat/completions", api.body(stream=True)),
    ):
        method, path, body = request
        assert api.http.request(method, path, json=body).headers["x-request-id"].startswith("req_")
        given = api.http.request(method, path, json=body, headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize(
    ("authorization", "status"), [("Bearer one", 200), ("Bearer two", 200), ("Bearer no", 401), (None, 401)]
)
def test_keys_are_asked_for_where_there_are_some(keyed: ApiServer, authorization: str | None, status: int):
    """Everywhere but on probes."""
    headers = {"authorization": authorization} if authorization else {}
    response = keyed.http.get("/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert keyed.http.post("/v1/chat/completions", json=keyed.body(), headers=headers).status_code == 401
        assert keyed.http.get("/mesh", headers=headers).status_code == 401
        assert keyed.http.get("/readyz", headers=headers).status_code == 200


SDK_HEADERS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count"


def test_browsers_may_call_from_pages_of_this_machine(api: ApiServer):
    """Preflight with the SDK's headers, answers, streams and errors."""
    origin = {"origin": "http://localhost:3000"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": SDK_HEADERS}
    preflight = api.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == SDK_HEADERS
    responses = [preflight, api.http.get("/v1/models", headers=origin), api.http.get("/no", headers=origin)]
    bodies = (api.body(), api.body(stream=True), api.body(n=2))
    responses += [api.http.post("/v1/chat/completions", json=body, headers=origin) for body in bodies]
    for response in responses:
        assert response.headers["access-control-allow-origin"] == origin["origin"]
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_foreign_pages_may_call_only_where_a_key_guards(api: ApiServer, keyed: ApiServer):
    """Without keys a page that its user merely visits could use the mesh."""
    foreign = {"origin": "https://example.com"}
    assert "access-control-allow-origin" not in api.http.get("/v1/models", headers=foreign).headers
    refused = keyed.http.get("/v1/models", headers=foreign)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
        CALL_HEAD + b"Content-Length: -1\r\n\r\n",
        CALL_HEAD + b"Content-Length: 9\r\n\r\n{}",
        b"\x16\x03\x01\x00\xff garbage",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000,
    ],
)
def test_what_is_hardly_http_leaves_the_server_whole(api: ApiServer, data: bytes):
    """Closed connections, bad lengths, other protocols; the fixture then makes a normal call."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while received := connection.recv(65536):
                answer += received
        except ConnectionError:
            pass
    assert b" 200 " not in answer[:20] or b"GET /v1/models" in data


def test_a_crash_of_ours_is_a_500_that_tells_nothing(api: ApiServer):
    """The log has the traceback, the caller a request id."""
    api.generator.script = lambda _request: [RuntimeError("secret detail")]
    for stream in (False, True):
        with structlog.testing.capture_logs() as events:
            response = api.chat(stream=stream)
        error = error_of(response, 500)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "secret" not in str(error)
        (crash,) = [event for event in events if event["event"] == "request.crashed"]
        assert crash["request_id"] == response.headers["x-request-id"]
