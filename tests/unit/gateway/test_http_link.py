"""What a response over HTTP means, and what a node that gives none."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import respx

from gateway.http_link import HttpLink, dial_http
from shared.errors import FrameError, HandshakeRefused, LinkClosed
from shared.frame import DEFAULT_LIMITS, encode_frame
from shared.layers import LayerRange
from shared.messages import (
    CacheMiss,
    Cancel,
    Error,
    Heartbeat,
    Hello,
    Message,
    Release,
    Step,
    StepResult,
    encode_header,
)
from shared.tensor_spec import WireTensor

URL = "http://node.test:9001"
INFO = {"node": "old", "model": "m", "layers": [0, 2], "num_layers": 4, "features": ["fork", "score"]}
HELLO = Hello(versions=(1,), role="gateway", peer="g", token="t", model="m")
LAYERS = LayerRange(0, 2)
PREFILL = Step(session="s", step_index=3, epoch=1, cache="prefill", new_len=2, layers=LAYERS, model="m")
DECODE = Step(session="s", step_index=4, epoch=1, cache="decode", past_len=2, layers=LAYERS, model="m")
STATELESS = Step(session="s", step_index=5, new_len=3, layers=LAYERS, model="m")
IDS = {"token_ids": WireTensor("i32", (1, 2), memoryview(bytes(8)))}
HIDDEN = WireTensor("f32", (1, 1, 2), memoryview(bytes(8)))


async def dial(router: respx.MockRouter, hello: Hello = HELLO, **info: Any) -> HttpLink:
    """A link to a node that describes itself so."""
    router.get(f"{URL}/info").respond(json=INFO | info)
    return await dial_http(URL, hello)


async def asked(router: respx.MockRouter, step: Step, **response: Any) -> tuple[Message, dict[str, WireTensor]]:
    """What the link gives for a step that is answered so."""
    link = await dial(router)
    router.post(f"{URL}/forward").respond(**response)
    await link.send(step, IDS)
    try:
        async with asyncio.timeout(5):
            return await link.receive()
    finally:
        await link.close()


@pytest.fixture
def router() -> Any:
    """Whatever is asked over HTTP."""
    with respx.mock(assert_all_called=False) as mocked:
        yield mocked


async def test_a_node_is_what_it_says_and_what_the_binding_can(router: respx.MockRouter) -> None:
    """Nothing asks it to copy or to go back; one that says nothing of token ids is an old tail."""
    link = await dial(router)
    assert link.peer == "old"
    assert link.peer_node.features == ("score",)
    assert not link.peer_node.token_ids
    assert link.peer_node.state == "ready"
    assert link.peer_machine is None
    assert router.calls.last.request.headers["authorization"] == "Bearer t"
    await link.close()


@pytest.mark.parametrize(
    ("step", "headers"),
    [
        (PREFILL, {"x-meshnet-session": "s", "x-meshnet-cache": "prefill"}),
        (DECODE, {"x-meshnet-session": "s", "x-meshnet-cache": "decode", "x-meshnet-past-len": "2"}),
        (STATELESS, {}),
    ],
)
async def test_cache_modes_are_headers(router: respx.MockRouter, step: Step, headers: dict[str, str]) -> None:
    """ADR-0022's; the body is the frame that a WebSocket would carry."""
    await asked(router, step, json={"token_id": 1})
    request = router.calls.last.request
    assert {name: value for name, value in request.headers.items() if name.startswith("x-meshnet")} == headers
    assert request.content == b"".join(encode_frame(encode_header(step), IDS))


async def test_a_frame_is_an_answer_with_tensors(router: respx.MockRouter) -> None:
    """Whatever it repeats of the step, it answers the step that was asked."""
    answer = StepResult(session="other", step_index=99, compute_us=7)
    content = b"".join(encode_frame(encode_header(answer), {"hidden_states": HIDDEN}))
    message, tensors = await asked(router, DECODE, content=content, content_type="application/octet-stream")
    assert message == StepResult(session="s", step_index=4, epoch=1, compute_us=7)
    assert tensors["hidden_states"].shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"json": {"token_id": 5}}, StepResult(session="s", step_index=4, epoch=1, token_ids=(5,))),
        ({"json": {"text": "a"}}, StepResult(session="s", step_index=4, epoch=1, text="a")),
        ({"json": {"token_id": 5, "cached": False}},
         StepResult(session="s", step_index=4, epoch=1, token_ids=(5,), cached=False)),
        ({"json": {}}, StepResult(session="s", step_index=4, epoch=1)),
        ({"status_code": 409, "json": {"error": "cache_miss"}},
         CacheMiss(session="s", step_index=4, epoch=1, reason="unknown")),
        ({"status_code": 409, "json": {"error": "cache_miss", "reason": "expired"}},
         CacheMiss(session="s", step_index=4, epoch=1, reason="expired")),
        ({"status_code": 409, "json": {"error": "cache_miss", "reason": ["?"]}},
         CacheMiss(session="s", step_index=4, epoch=1, reason="unknown")),
        ({"status_code": 409, "json": {"error": "busy", "message": "no"}},
         Error(code="busy", message="no", session="s", step_index=4, epoch=1)),
        ({"status_code": 503, "html": "<h1>busy</h1>"},
         Error(code="not_ready", message="HTTP status 503", session="s", step_index=4, epoch=1)),
        ({"status_code": 500, "json": {"error": "no identifier", "message": "x" * 900}},
         Error(code="http_500", message="x" * 500, session="s", step_index=4, epoch=1)),
    ],
)  # fmt: skip
async def test_what_a_response_means(router: respx.MockRouter, response: dict[str, Any], expected: Message) -> None:
    """JSON of a last hop, a miss, and failures with or without words."""
    assert (await asked(router, DECODE, **response))[0] == expected


async def test_bytes_that_are_no_frame_end_the_link(router: respx.MockRouter) -> None:
    """As over a WebSocket."""
    with pytest.raises(FrameError):
        await asked(router, DECODE, content=b"garbage", content_type="application/octet-stream")


async def test_an_answer_over_the_limit_is_not_kept(router: respx.MockRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a node goes on sending."""
    monkeypatch.setattr("gateway.http_link.DEFAULT_LIMITS", type(DEFAULT_LIMITS)(payload_bytes_max=1000))
    with pytest.raises(FrameError, match="more than a frame may hold"):
        await asked(router, DECODE, content=bytes(2_000_000), content_type="application/octet-stream")


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ({"status_code": 401}, "unauthorized"),
        ({"json": INFO | {"model": "another"}}, "model_mismatch"),
        ({"html": "<h1>hello</h1>"}, "not_http_node"),
        ({"json": [1]}, "not_http_node"),
        ({"json": {"node": "old"}}, "not_http_node"),
    ],
)
async def test_a_node_that_cannot_be_used_is_refused(
    router: respx.MockRouter, response: dict[str, Any], code: str
) -> None:
    """Before any step is asked."""
    router.get(f"{URL}/info").respond(**response)
    with pytest.raises((HandshakeRefused, LinkClosed)) as refused:
        await dial_http(URL, HELLO)
    assert refused.value.code == code


async def test_a_node_that_is_not_there_is_unreachable(router: respx.MockRouter) -> None:
    """Nobody listens."""
    router.get(f"{URL}/info").mock(side_effect=httpx.ConnectError("refused"))
    with pytest.raises(LinkClosed, match="refused") as closed:
        await dial_http(URL, HELLO)
    assert closed.value.code == "unreachable"


async def test_a_request_that_breaks_ends_the_link(router: respx.MockRouter) -> None:
    """Whoever sends or receives is told."""
    link = await dial(router)
    router.post(f"{URL}/forward").mock(side_effect=httpx.ReadError("reset"))
    await link.send(DECODE, IDS)
    with pytest.raises(LinkClosed, match="reset"):
        await link.receive()
    with pytest.raises(LinkClosed):
        await link.send(DECODE, IDS)
    with pytest.raises(LinkClosed):
        await link.receive()
    await link.close()


async def test_heartbeats_ask_whether_it_is_there_unless_it_computes(router: respx.MockRouter) -> None:
    """A step on its way has a deadline of its own, and a simple node answers one request at a time."""
    link = await dial(router)
    await link.send(Heartbeat(seq=1))
    assert await link.receive() == (Heartbeat(seq=1, reply=True), {})
    asked_info = router.calls.call_count
    released = asyncio.Event()

    async def compute(_: httpx.Request) -> httpx.Response:
        await released.wait()
        return httpx.Response(200, json={"token_id": 1})

    router.post(f"{URL}/forward").mock(side_effect=compute)
    await link.send(DECODE, IDS)
    await link.send(Heartbeat(seq=2))
    assert await link.receive() == (Heartbeat(seq=2, reply=True), {})
    released.set()
    assert isinstance((await link.receive())[0], StepResult)
    assert router.calls.call_count == asked_info + 1
    await asyncio.sleep(0.01)  # the request has ended
    router.get(f"{URL}/info").mock(side_effect=httpx.ReadTimeout("late"))
    await link.send(Heartbeat(seq=3))
    with pytest.raises(LinkClosed, match="late"):
        await link.receive()
    await link.close()


async def test_a_cancelled_step_is_given_up_and_a_release_is_nothing(router: respx.MockRouter) -> None:
    """Its connection is closed, and no answer comes of it; other sessions' steps go on."""
    link = await dial(router)
    ended = asyncio.Event()

    async def compute(request: httpx.Request) -> httpx.Response:
        if request.headers["x-meshnet-session"] == "other":
            return httpx.Response(200, json={"token_id": 2})
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    router.post(f"{URL}/forward").mock(side_effect=compute)
    await link.send(DECODE, IDS)
    await asyncio.sleep(0.05)
    await link.send(Release(session="x"))
    await link.send(Cancel(session="s"))
    await asyncio.wait_for(ended.wait(), 5)
    other = Step(session="other", step_index=0, cache="prefill", layers=LAYERS, model="m")
    await link.send(other, IDS)
    assert (await link.receive())[0] == StepResult(session="other", step_index=0, token_ids=(2,))
    await link.close()


def test_settings_take_http_addresses() -> None:
    """As they take WebSocket ones."""
    from gateway.settings import parse_node_url

    assert parse_node_url("http://a:9001") == "http://a:9001"
    assert parse_node_url("https://a/mesh") == "https://a/mesh"
    with pytest.raises(ValueError, match="must look like"):
        parse_node_url("ftp://a:9001")
