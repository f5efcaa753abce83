"""The served model's files: for whoever has the mesh token, range by range, and never in the way of chat."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import model_files
from gateway.model_files import SENDS_AT_ONCE_MAX, ModelFiles
from gateway.response_writer import StreamLimits
from shared.mesh_tokens import MeshTokens
from shared.models.fingerprint import fingerprint
from shared.models.folder import ModelFolder
from tests.support.api_server import ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.numpy_model import FILES, numpy_model, write_files
from tests.support.text_tokenizers import build_byte_level

MODEL = numpy_model()
TOKEN = "mesh-secret"
LARGE = "model-00003-of-00003.safetensors"
LARGE_BYTES = 64 * 2**20
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the gateway's text side needs."""
    return build_byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model, and beside it what nobody may read."""
    path = write_files(tmp_path_factory.mktemp("served"), MODEL)
    (path / "secret.txt").write_text("secret")
    (path.parent / "outside.txt").write_text("secret")
    return ModelFolder(path, "org/tiny", fingerprint(path))


def serve(tokenizer_folder: Path, files: ModelFiles | None, **options: Any) -> Any:
    """A gateway with these files."""
    return running_api(tokenizer_folder, model_files=files, **options)


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path, folder: ModelFolder) -> Iterator[ApiServer]:
    """One gateway for all tests that need no other, with API keys and a mesh token."""
    with serve(tokenizer_folder, ModelFiles(folder, MeshTokens([TOKEN])), api_keys=("api-secret",)) as running:
        yield running


def get(server: ApiServer, name: str, headers: dict[str, str] | None = None, method: str = "GET") -> httpx.Response:
    """Ask for a file, with the mesh token."""
    assert server.state.model_files is not None
    path = f"/mesh/models/{server.state.model_files.fingerprint}{name}"
    return server.http.request(method, path, headers={**AUTHORIZED, **(headers or {})})


def test_the_list_has_every_file_with_size_and_hash(server: ApiServer):
    """Small files' hashes, so that a node knows damaged ones; nothing else that lies in the folder."""
    response = get(server, "")
    assert response.status_code == 200
    files = {file.pop("name"): file for file in response.json()["files"]}
    assert set(files) == set(MODEL)
    for name, file in files.items():
        sha256 = None if name in FILES else hashlib.sha256(MODEL[name]).hexdigest()
        assert file == {"size_bytes": len(MODEL[name]), "sha256": sha256}


@pytest.mark.parametrize(
    ("header", "status", "start", "end"),
    [(None, 200, 0, None), ("bytes=1000-500000", 206, 1000, 500_001), ("bytes=-7", 206, -7, None)],
)
def test_bytes_come_as_they_are(server: ApiServer, header: str | None, status: int, start: int, end: int | None):
    """The range asked for, its place, its hash, and whose it is."""
    response = get(server, f"/{FILES[0]}", {"range": header} if header else None)
    expected = MODEL[FILES[0]][start:end]
    assert (response.status_code, response.content) == (status, expected)
    assert response.headers["etag"] == server.state.model_files.etag  # type: ignore[union-attr]
    assert response.headers["content-length"] == str(len(expected))
    digest = base64.b64encode(hashlib.sha256(expected).digest()).decode()
    assert response.headers["content-digest"] == f"sha-256=:{digest}:"
    size, first = len(MODEL[FILES[0]]), start % len(MODEL[FILES[0]])
    place = f"bytes {first}-{first + len(expected) - 1}/{size}" if header else None
    assert response.headers.get("content-range") == place


def test_a_head_sends_headers_alone(server: ApiServer):
    """Nothing is read for it."""
    response = get(server, f"/{FILES[0]}", method="HEAD")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == str(len(MODEL[FILES[0]]))
    assert "content-digest" not in response.headers


def test_a_range_after_the_end_is_416(server: ApiServer):
    """With the true size."""
    size = len(MODEL[FILES[0]])
    response = get(server, f"/{FILES[0]}", {"range": f"bytes={size}-"})
    assert (response.status_code, response.headers["content-range"]) == (416, f"bytes */{size}")


@pytest.mark.parametrize(
    "name",
    ["secret.txt", "..%2foutside.txt", "%2e%2e", "..", ".", "../outside.txt", "%2fetc%2fpasswd", "", "config.json%00"],
)
def test_nothing_but_the_models_files_can_be_read(server: ApiServer, name: str):
    """By its name alone, and as a path that leaves the folder."""
    assert server.state.model_files is not None
    base = f"{server.url}/mesh/models/{server.state.model_files.fingerprint}/"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        path = base.removeprefix(server.url) + name
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        answer = connection.recv(65536)
    assert b"secret" not in answer
    if name:
        assert answer.split()[1] == b"404"


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer api-secret"}, {"authorization": TOKEN}],
)
@pytest.mark.parametrize("name", ["", "/config.json", f"/{FILES[0]}"])
def test_only_the_mesh_token_opens_them(server: ApiServer, name: str, headers: dict[str, str]):
    """An API key is for chat."""
    response = get(server, name, {"authorization": "", **headers})
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_mesh_token")


def test_the_mesh_token_opens_nothing_else(server: ApiServer):
    """Neither chat nor the view of the mesh, and no path that only begins alike."""
    for path in ("/v1/models", "/mesh", "/mesh/modelsx"):
        assert server.http.get(path, headers=AUTHORIZED).status_code == 401


def test_another_model_is_not_here(server: ApiServer):
    """A node that was told to hold another hears so."""
    response = server.http.get("/mesh/models/0000000000000000/config.json", headers=AUTHORIZED)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_model")


def test_without_a_mesh_token_the_api_keys_decide(tokenizer_folder: Path, folder: ModelFolder):
    """Weights are not open where chat is not."""
    with serve(tokenizer_folder, ModelFiles(folder, MeshTokens()), api_keys=("api-secret",)) as server:
        assert get(server, "/config.json").status_code == 401
        assert get(server, "/config.json", {"authorization": "Bearer api-secret"}).status_code == 200
    with serve(tokenizer_folder, ModelFiles(folder, MeshTokens())) as server:
        assert get(server, "/config.json", {"authorization": ""}).status_code == 200


def test_a_gateway_without_weights_says_where_they_are(tokenizer_folder: Path):
    """It serves a hub model from its headers alone."""
    with serve(tokenizer_folder, None) as server:
        response = server.http.get("/mesh/models/0000000000000000")
        assert response.status_code == 404
        assert "from the hub" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model with a file that no socket buffer takes at once."""
    path = write_files(tmp_path_factory.mktemp("large"), {"config.json": b"{}", "tokenizer.json": b"{}"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": LARGE}}))
    with (path / LARGE).open("wb") as file:
        file.truncate(LARGE_BYTES)
    return ModelFolder(path, "large", "f" * 16)


def start_download(server: ApiServer) -> socket.socket:
    """Ask for the large file and read nothing."""
    connection = server.connect(receive_buffer=4096)
    connection.sendall(f"GET /mesh/models/{'f' * 16}/{LARGE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return connection


def places_left(server: ApiServer) -> int:
    """How many more may read."""
    assert server.state.model_files is not None
    return server.state.model_files._places._value


def test_readers_are_few_and_chat_goes_on(
    tokenizer_folder: Path, large_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
):
    """A fifth is told to come again; chat answers meanwhile; readers that leave make room."""
    monkeypatch.setattr(model_files, "WAIT_S_MAX", 0.1)
    with serve(tokenizer_folder, ModelFiles(large_folder, MeshTokens())) as server:
        readers = [start_download(server) for _ in range(SENDS_AT_ONCE_MAX)]
        wait_until(lambda: places_left(server) == 0, "every place taken")
        refused = get(server, "/config.json")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert refused.headers["retry-after"] == "1"
        server.answer_with("hello")
        assert server.chat().json()["choices"][0]["message"]["content"] == "hello"
        for reader in readers:
            reader.close()
        wait_until(lambda: places_left(server) == SENDS_AT_ONCE_MAX, "every place free")
        assert get(server, "/config.json").status_code == 200


def test_a_reader_that_takes_nothing_loses_its_place(tokenizer_folder: Path, large_folder: ModelFolder):
    """A node whose machine has stopped holds nobody up for long."""
    limits = StreamLimits(stall_s=0.2)
    with serve(tokenizer_folder, ModelFiles(large_folder, MeshTokens()), stream_limits=limits) as server:
        with start_download(server):
            wait_until(lambda: places_left(server) == SENDS_AT_ONCE_MAX - 1, "a place taken")
            wait_until(lambda: places_left(server) == SENDS_AT_ONCE_MAX, "the place free")
        assert get(server, "/config.json").status_code == 200


def test_a_large_answer_is_not_held_in_memory(tokenizer_folder: Path, large_folder: ModelFolder):
    """It comes whole, chunk by chunk, without a hash for which all of it would be read twice."""
    with serve(tokenizer_folder, ModelFiles(large_folder, MeshTokens())) as server:
        before, count = _resident_bytes(), 0
        with httpx.stream("GET", f"{server.url}/mesh/models/{'f' * 16}/{LARGE}") as response:
            assert "content-digest" not in response.headers
            for chunk in response.iter_raw():
                count += len(chunk)
        assert count == LARGE_BYTES
        assert _resident_bytes() - before < LARGE_BYTES / 2


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
