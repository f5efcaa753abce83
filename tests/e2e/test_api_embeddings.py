"""Embeddings over real HTTP: with the real SDK, which asks for base64, and by hand."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from gateway.errors import AdmissionRefused
from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.fleet import wait_until
from tests.support.scripted_generator import FOR_EVER
from tests.support.text_tokenizers import CONTEXT_LEN, build_byte_level

NOTICED_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(build_byte_level(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server, whose vectors are the first id and 1, or for the last token the last id and 2."""
    server.reset()
    server.generator.embedding = lambda ids, pooling: (
        (float(ids[0]), 1.0) if pooling == "mean" else (float(ids[-1]), 2.0)
    )
    return server


def embed(api: ApiServer, **body: Any) -> httpx.Response:
    """POST."""
    return api.http.post("/v1/embeddings", json={"model": MODEL, **body})


def unit(first: float, second: float) -> Any:
    """Of length 1, as precise as float32."""
    length = math.hypot(first, second)
    return pytest.approx([first / length, second / length], abs=1e-6)


@pytest.mark.parametrize("asked", [{"encoding_format": "float"}, {}])
def test_the_sdk_gets_the_vectors_of_its_texts(api: ApiServer, asked: Any):
    """In order, with true usage; by itself it asks for base64, which its own strict validation does not know."""
    client = api.client(_strict_response_validation=bool(asked))
    response = client.embeddings.create(model=MODEL, input=["The mesh", "Ein Knoten"], **asked)
    ids = [api.tokenizer.encode_text(text) for text in ("The mesh", "Ein Knoten")]
    assert [item.index for item in response.data] == [0, 1]
    assert [item.embedding for item in response.data] == [unit(float(one[0]), 1.0) for one in ids]
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, ids))
    assert (response.model, response.object) == (MODEL, "list")


@pytest.mark.parametrize(
    ("given", "ids"),
    [([5, 6], [(5, 6)]), ([[5, 6], [7]], [(5, 6), (7,)]), (["a", [7]], [(68,), (7,)])],
)
def test_ids_stand_for_themselves(api: ApiServer, given: object, ids: list[tuple[int, ...]]):
    """One list, several, and beside texts."""
    ids = [api.tokenizer.encode_text("a") if one == (68,) else one for one in ids]
    assert len(embed(api, input=given).json()["data"]) == len(ids)
    assert [one for one, _ in api.generator.embeds] == ids


def test_base64_and_float_say_the_same(api: ApiServer):
    """Little-endian float32."""
    (item,) = embed(api, input=[5], encoding_format="base64").json()["data"]
    (plain,) = embed(api, input=[5], encoding_format="float").json()["data"]
    assert list(struct.unpack("<2f", base64.b64decode(item["embedding"]))) == plain["embedding"] == unit(5.0, 1.0)


def test_pooling_and_normalization_can_be_chosen(api: ApiServer):
    """The last token instead of the mean; the numbers as the model has them."""
    (item,) = embed(api, input=[5, 6], pooling="last", normalize=False).json()["data"]
    assert item["embedding"] == [6.0, 2.0]
    assert api.generator.embeds == [((5, 6), "last")]


def test_many_inputs_run_a_few_at_a_time(api: ApiServer):
    """All of them are answered, in order."""
    data = embed(api, input=[[index % 300 + 1] for index in range(100)]).json()["data"]
    assert [item["embedding"] for item in data] == [unit(index % 300 + 1.0, 1.0) for index in range(100)]
    assert api.generator.active_max <= 4


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": {}}, "input", "invalid_type"),
        ({"input": [1, "a"]}, "input[1]", "invalid_type"),
        ({"input": [True]}, "input[0]", "invalid_type"),
        ({"input": [[1], 2]}, "input[1]", "invalid_type"),
        ({"input": [[1, 99999]]}, "input[1]", "invalid_value"),
        ({"input": [-1]}, "input[0]", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": ["a", "a " * 3 * CONTEXT_LEN]}, "input[1]", "context_length_exceeded"),
        ({"input": "x" * 200_000}, "input", "context_length_exceeded"),
        ({"input": [[1] * CONTEXT_LEN] * 1200}, "input", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "encoding_format": 1}, "encoding_format", "invalid_type"),
        ({"input": "a", "pooling": "cls"}, "pooling", "invalid_value"),
        ({"input": "a", "normalize": 1}, "normalize", "invalid_type"),
        ({"input": "a", "dimensions": 2}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "user": 1}, "user", "invalid_type"),
    ],
)
def test_what_is_wrong_is_named(api: ApiServer, body: dict[str, Any], param: str, code: str):
    """A 400 in OpenAI's shape, before anything is computed."""
    response = embed(api, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert not api.generator.embeds


def test_an_input_that_fills_the_context_is_embedded(api: ApiServer):
    """Nothing is to be generated, so no room is needed for it; one more token is too many, and the numbers are true."""
    assert embed(api, input=[5] * CONTEXT_LEN).status_code == 200
    error = embed(api, input=[5] * (CONTEXT_LEN + 1)).json()["error"]
    assert f"maximum context length is {CONTEXT_LEN} tokens" in error["message"]
    assert f"{CONTEXT_LEN + 1} tokens" in error["message"]


def test_an_unknown_model_is_a_404(api: ApiServer):
    """As everywhere."""
    with pytest.raises(openai.NotFoundError):
        api.client().embeddings.create(model="text-embedding-3-small", input="a")


def test_a_full_mesh_is_a_429(api: ApiServer):
    """And the other inputs are given up."""
    api.generator.admission = [AdmissionRefused("queue_full", "full", retry_after_s=3)]
    response = embed(api, input=["a", "b"])
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert api.generator.active == 0


def test_numbers_that_are_none_are_an_error(api: ApiServer):
    """Never NaN in JSON."""
    api.generator.embedding = lambda _ids, _pooling: (math.nan,)
    response = embed(api, input="a")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_finite")


def test_a_client_that_leaves_ends_the_work(api: ApiServer):
    """All of it, within a second."""
    api.generator.admission = [FOR_EVER()]
    connection = api.connect()
    body = b'{"model":"default","input":["a","b","c","d","e","f"]}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    wait_until(lambda: api.generator.active == 4, "the work to begin")
    connection.close()
    wait_until(lambda: api.generator.active == 0, "the end of the work", NOTICED_S)
    assert set(api.generator.ends) == {"cancelled"}
    assert len(api.generator.embeds) == 4
