"""The real application under a real uvicorn on loopback, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

from gateway.app import create_app
from gateway.server import create_server
from gateway.state import GatewayState, ServedModel
from gateway.tokenizer import ChatTokenizer, load_tokenizer
from tests.support.fleet import wait_until
from tests.support.scripted_generator import ScriptedGenerator, ScriptedMesh
from tests.support.stream_validator import ValidStream, validate_stream

T = TypeVar("T")
START_TIMEOUT_S = 10.0
MODEL = "org/tiny-model"
CALL_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass
class ApiServer:
    """A running gateway whose generator is scripted."""

    port: int
    state: GatewayState
    generator: ScriptedGenerator
    mesh: ScriptedMesh
    loop: asyncio.AbstractEventLoop
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=20)

    @property
    def url(self) -> str:
        """Without the ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The served model's."""
        return self.state.tokenizer

    def client(self, **options: Any) -> openai.OpenAI:
        """An SDK client that validates every response strictly and does not retry."""
        options = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def reset(self) -> None:
        """Forget scripts and records of the test before."""
        wait_until(lambda: self.generator.active == 0, "the end of all generations")
        self.generator.__init__()  # type: ignore[misc]
        self.mesh.__init__()  # type: ignore[misc]

    def body(self, **parameters: Any) -> dict[str, Any]:
        """The smallest chat body, and more."""
        return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **parameters}

    def chat(self, **parameters: Any) -> httpx.Response:
        """POST a chat completion."""
        return self.http.post("/v1/chat/completions", json=self.body(**parameters))

    def stream(self, **parameters: Any) -> ValidStream:
        """A streamed chat completion, validated."""
        response = self.chat(stream=True, **parameters)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        options = parameters.get("stream_options") or {}
        return validate_stream(response.content, include_usage=bool(options.get("include_usage")))

    def answer_with(self, text: str, *, end: bool = True) -> list[int]:
        """Script every answer to be this text, with an end token or without."""
        ids = list(self.tokenizer.encode_text(text))
        if end:
            ids.append(min(self.tokenizer.eos_ids))
        self.generator.script = lambda _request: ids
        return ids

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """A connection in the caller's hands."""
        connection = socket.socket()
        connection.settimeout(10)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def send_call(self, connection: socket.socket, **parameters: Any) -> socket.socket:
        """A chat completion whose answer is left unread; returns the connection."""
        body = json.dumps(self.body(**parameters)).encode()
        connection.sendall(CALL_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return connection

    def in_loop(self, call: Callable[[], T]) -> T:
        """Run something in the server's event loop."""

        async def run() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=5)


@contextmanager
def running_api(model: Path, **options: Any) -> Iterator[ApiServer]:
    """Serve; `options` are fields of `GatewayState`, `http_limits`, and `context` for TLS."""
    http_limits, context = options.pop("http_limits", None), options.pop("context", None)
    generator, mesh = ScriptedGenerator(), ScriptedMesh()
    state = GatewayState(
        model=ServedModel(names=(MODEL, "alias"), fingerprint="0123456789abcdef", created=1_700_000_000),
        tokenizer=options.pop("tokenizer", None) or load_tokenizer(model),
        generator=generator,
        mesh=mesh,
        **options,
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = create_server(create_app(state), drain_s=1.0, limits=http_limits, context=context)
        started = threading.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            started.set()
            await task

        import uvloop

        thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
        thread.start()
        assert started.wait(START_TIMEOUT_S)
        api = ApiServer(listener.getsockname()[1], state, generator, mesh, loops[0])
        try:
            yield api
        finally:
            api.http.close()
            server.should_exit = True
            thread.join(START_TIMEOUT_S)
            assert not thread.is_alive()
