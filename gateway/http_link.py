"""A link to a node that speaks HTTP: the binding of docs/protocol.md, over `httpx`.

To the rest of the gateway it is an open link like any other. Each step is a ``POST /forward`` of its own, several at
once; answers are received in the order in which they came. Such a node knows no heartbeats, so ours are answered here:
while a step is on its way by the wait for it, which has a deadline of its own, otherwise by ``GET /info``. It keeps
sessions until they expire, so a release is not sent; a cancelled step's connection is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

import httpx
import orjson

from shared.errors import CACHE_MISS_REASONS, FrameError, HandshakeRefused, LinkClosed, MeshError
from shared.frame import DEFAULT_LIMITS, decode_frame, encode_frame
from shared.link import LinkCounters
from shared.messages import (
    CacheMiss,
    Cancel,
    Error,
    Heartbeat,
    Hello,
    MachineInfo,
    Message,
    NodeInfo,
    Probe,
    Step,
    StepResult,
    Unsupported,
    decode_header,
    encode_header,
)
from shared.tensor_spec import WireTensor

CONNECT_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 5.0
"""How long ``GET /info`` may take."""
FRAME = "application/octet-stream"
REASON_CHARS_MAX = 500
"""How much of a node's own words is passed on."""
SESSION_FEATURES = ("fork", "rewind")
"""What this binding has no request for."""
STATUS_OK, STATUS_MISS, STATUS_BUSY = 200, 409, 503

Item = tuple[Message, dict[str, WireTensor]] | MeshError


async def dial_http(url: str, hello: Hello, *, context: ssl.SSLContext | None = None) -> HttpLink:
    """Ask a node at an ``http://`` or ``https://`` address what it serves.

    Args:
        url: Where ``/info`` and ``/forward`` are.
        hello: What the gateway would say of itself: its token and the model that it expects.
        context: TLS; None trusts what the system trusts.

    Raises:
        HandshakeRefused: `unauthorized`, or `model_mismatch`.
        LinkClosed: `unreachable`, or `not_http_node` when what answers is none.
    """
    headers = {"authorization": f"Bearer {hello.token}"} if hello.token is not None else {}
    client = httpx.AsyncClient(
        base_url=url,
        headers=headers,
        verify=context or True,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )
    try:
        info = await _ask_info(client, url)
        _check_model(info, hello)
    except BaseException:
        await client.aclose()
        raise
    return HttpLink(client, info, url)


def _check_model(info: NodeInfo, hello: Hello) -> None:
    if hello.model is not None and info.model != hello.model:
        raise HandshakeRefused("model_mismatch", f"{info.node} serves model {info.model}, not {hello.model}")


class HttpLink:
    """An open link. Made by `dial_http`.

    Args:
        client: Of the node's address; the link owns it.
        info: What the node said of itself.
        url: For messages.
    """

    def __init__(self, client: httpx.AsyncClient, info: NodeInfo, url: str) -> None:
        self.counters = LinkCounters()
        self._client = client
        self._info = info
        self._url = url
        self._received: asyncio.Queue[Item] = asyncio.Queue()
        self._calls: dict[asyncio.Task[None], str | None] = {}
        self._end: MeshError | None = None

    @property
    def peer(self) -> str:
        """The node's id."""
        return self._info.node

    @property
    def peer_node(self) -> NodeInfo:
        """What it serves."""
        return self._info

    @property
    def peer_machine(self) -> MachineInfo | None:
        """It holds what it holds."""
        return None

    async def send(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> None:
        """Begin what the message asks for; its answer will be received.

        Raises:
            LinkClosed: The link is closed.
            FrameError: The message is over a frame's limits.
        """
        if self._end is not None:
            raise self._end
        match message:
            case Step():
                body = b"".join(encode_frame(encode_header(message), tensors or {}))
                self._call(self._forward(message, body), message.session)
            case Heartbeat(reply=False):
                self._beat(message)
            case Cancel():
                for call in [call for call, session in self._calls.items() if session == message.session]:
                    call.cancel()
            case Probe():
                self._received.put_nowait((Unsupported(unsupported=message.kind), {}))
            case _:
                pass  # what such a node does not know: it forgets sessions by itself, and makes no copies

    def send_now(self, message: Message, tensors: Mapping[str, WireTensor] | None = None) -> bool:  # noqa: ARG002
        """Never: each message is a request of its own."""
        return False

    async def receive(self) -> tuple[Message, dict[str, WireTensor]]:
        """The next answer.

        Raises:
            LinkClosed: The node cannot be reached any more, or the link was closed.
            FrameError: It answered with what is no frame.
        """
        if self._end is not None and self._received.empty():
            raise self._end
        item = await self._received.get()
        if isinstance(item, MeshError):
            raise item
        return item

    async def close(self, code: int = 1000, reason: str = "") -> None:  # noqa: ARG002 - HTTP has no code to close with
        """End all requests."""
        self._break(LinkClosed(reason or "closed", f"the link to {self._url} is closed", url=self._url))
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    # --- requests -------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, None], session: str | None) -> None:
        call = asyncio.create_task(work)
        self._calls[call] = session
        call.add_done_callback(self._calls.pop)

    def _beat(self, asked: Heartbeat) -> None:
        if any(session is not None for session in self._calls.values()):
            self._received.put_nowait((Heartbeat(seq=asked.seq, reply=True), {}))
        else:
            self._call(self._answer_beat(asked), None)

    async def _answer_beat(self, asked: Heartbeat) -> None:
        try:
            await _ask_info(self._client, self._url)
        except MeshError as error:
            self._break(error)
        else:
            self._received.put_nowait((Heartbeat(seq=asked.seq, reply=True), {}))

    async def _forward(self, step: Step, body: bytes) -> None:
        self.counters.count_sent(step.kind, [body])
        try:
            status, content, content_type = await self._post(step, body)
            message, tensors = _read_answer(step, status, content, content_type)
        except httpx.HTTPError as error:
            self._break(LinkClosed("unreachable", f"{self._url}: {_words(error)}", url=self._url))
        except MeshError as error:
            self._break(error)
        else:
            self.counters.count_received(message.kind, len(content))
            self._received.put_nowait((message, tensors))

    async def _post(self, step: Step, body: bytes) -> tuple[int, bytes, str]:
        headers = {"content-type": FRAME, **_step_headers(step)}
        async with self._client.stream("POST", "/forward", content=body, headers=headers) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > DEFAULT_LIMITS.frame_bytes_max:
                    raise FrameError("payload_too_large", f"{self._url} answers more than a frame may hold")
            return response.status_code, bytes(content), response.headers.get("content-type", "")

    def _break(self, error: MeshError) -> None:
        if self._end is None:
            self._end = error
            self._received.put_nowait(error)


async def _ask_info(client: httpx.AsyncClient, url: str) -> NodeInfo:
    try:
        response = await client.get("/info", timeout=INFO_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise LinkClosed("unreachable", f"{url}: {_words(error)}", url=url) from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise HandshakeRefused("unauthorized", f"{url} does not take the mesh token")
    try:
        content = orjson.loads(response.content)
        info = NodeInfo.from_header({"state": "ready", "token_ids": False, **content})
    except (orjson.JSONDecodeError, TypeError, FrameError) as error:
        raise LinkClosed(
            "not_http_node", f"{url}/info: status {response.status_code}, {_words(error)}", url=url
        ) from error
    return replace(info, features=tuple(name for name in info.features if name not in SESSION_FEATURES))


def _step_headers(step: Step) -> dict[str, str]:
    """ADR-0022's own headers; a stateless step has none."""
    if step.cache is None:
        return {}
    headers = {"x-meshnet-session": step.session, "x-meshnet-cache": step.cache}
    return headers | ({"x-meshnet-past-len": str(step.past_len)} if step.cache == "decode" else {})


def _read_answer(step: Step, status: int, content: bytes, content_type: str) -> tuple[Message, dict[str, WireTensor]]:
    """What a response says of its step.

    Raises:
        FrameError: It is neither a frame nor JSON.
    """
    names: dict[str, Any] = {"session": step.session, "step_index": step.step_index, "epoch": step.epoch}
    if status == STATUS_OK and not content_type.startswith("application/json"):
        frame = decode_frame(content)
        message = decode_header({**frame.header, "kind": StepResult.kind, **names})
        return message, dict(frame.tensors)
    answer = _read_json(content)
    if status == STATUS_OK:
        token_id, text = answer.get("token_id"), answer.get("text")
        cached = step.cache is not None and answer.get("cached") is not False
        token_ids = (token_id,) if isinstance(token_id, int) else None
        return StepResult(token_ids=token_ids, text=text if isinstance(text, str) else None, cached=cached, **names), {}
    code = str(answer.get("error", ""))[:REASON_CHARS_MAX]
    if status == STATUS_MISS and code in ("cache_miss", ""):
        reason = answer.get("reason")
        return CacheMiss(reason=reason if reason in CACHE_MISS_REASONS else "unknown", **names), {}
    reason = str(answer.get("message", f"HTTP status {status}"))[:REASON_CHARS_MAX]
    return Error(code=_code(code, status), message=reason, **names), {}


def _read_json(content: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None  # a proxy's page, most likely: the status says enough
    return answer if isinstance(answer, dict) else {}


def _code(code: str, status: int) -> str:
    if code.isidentifier() and len(code) <= 64:
        return code
    return "not_ready" if status == STATUS_BUSY else f"http_{status}"


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__
