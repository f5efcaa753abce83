"""Probes, the version, and methods that every route answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.version import VERSION
from tests.support.api_server import ApiServer, running_api
from tests.support.text_tokenizers import build_byte_level

GETS = ["/healthz", "/readyz", "/health", "/ping", "/version", "/tokenizer_info", "/v1/tokenizer_info", "/v1/models"]
POSTS = ["/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    return build_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(model) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, with a complete mesh."""
    server.reset()
    return server


@pytest.mark.parametrize("path", ["/health", "/ping", "/readyz"])
def test_probes_tell_whether_the_mesh_can_serve(api: ApiServer, path: str):
    """200 while a route exists, else 503 with what is missing."""
    assert api.http.get(path).status_code == 200
    api.mesh.missing = "no node has layers 3 to 5"
    response = api.http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert api.http.get("/healthz").status_code == 200


def test_a_probe_by_post(api: ApiServer):
    """SageMaker's way."""
    assert api.http.post("/ping").status_code == 200
    api.mesh.missing = "nothing there"
    assert api.http.post("/ping").status_code == 503


def test_the_version(api: ApiServer):
    """This software's own."""
    assert api.http.get("/version").json() == {"version": VERSION}


@pytest.mark.parametrize("path", GETS)
def test_head_answers_as_get_does_without_a_body(api: ApiServer, path: str):
    """Status, type and length."""
    get, head = api.http.get(path), api.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize("path", [*GETS, *POSTS])
def test_options_names_the_methods(api: ApiServer, path: str):
    """With and without an Origin."""
    response = api.http.options(path)
    assert response.status_code == 204
    assert ("GET" if path in GETS else "POST") in response.headers["allow"]


@pytest.mark.parametrize("path", POSTS)
def test_reading_what_must_be_posted_is_a_405(api: ApiServer, path: str):
    """In OpenAI's shape."""
    response = api.http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


def test_probes_need_no_key_and_everything_else_does(model: Path):
    """They learn nothing but a state."""
    with running_api(model, api_keys=("one",)) as keyed:
        assert [keyed.http.get(path).status_code for path in ("/health", "/ping")] == [200, 200]
        assert keyed.http.post("/ping").status_code == 200
        for path in ("/version", "/tokenizer_info"):
            assert keyed.http.get(path).status_code == 401
        for path in POSTS:
            assert keyed.http.post(path, json={}).status_code == 401
