"""A small node of ADR-0022's protocol over HTTP, of hashes: as somebody else might have written it.

It knows the three headers, keeps sessions, and reads of a frame what it needs. It runs on threads of a test's process.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shared.errors import StepFailed
from shared.frame import decode_frame, encode_frame
from shared.layers import LayerRange
from shared.messages import SAMPLING_FIELDS, Step, decode_header, encode_header
from tests.support.scripted_stage import Held, Stage


@dataclass
class HttpNode:
    """What a test sees and sets.

    Args:
        stage: What it computes.
        model: Fingerprint that it names.
        token: What callers must present.
        info: Further fields of ``GET /info``.
        knows_cache: As a node without cache support, it computes everything that it is given from its beginning.
        json_tail: As the last node, it answers with ``{"token_id": …}`` or ``{"text": …}`` instead of a frame.
    """

    stage: Stage
    model: str
    token: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    knows_cache: bool = True
    json_tail: bool = False
    port: int = 0
    sessions: dict[str, Held] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    failing: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def describe(self) -> dict[str, Any]:
        """Answer ``GET /info``."""
        layers = self.stage.layers
        about = {"node": f"http-{layers.start}", "model": self.model, "layers": [layers.start, layers.end]}
        about |= {"num_layers": self.stage.num_layers, "sampling": list(SAMPLING_FIELDS), "token_ids": True}
        return about | {"kv_cache": self.knows_cache} | self.info

    def forward(self, headers: Any, body: bytes) -> tuple[int, bytes, str]:
        """Answer ``POST /forward``: status, body, content type."""
        if self.failing:
            status, content = self.failing.pop(0)
            return status, content, "application/json"
        frame = decode_frame(body)
        step = decode_header(frame.header)
        assert isinstance(step, Step)
        mode, base = headers.get("x-meshnet-cache"), None
        assert mode == step.cache
        self.served[mode or "stateless"] += 1
        if mode == "decode":
            base = self.sessions.get(headers["x-meshnet-session"])
            if base is None or base.length != int(headers["x-meshnet-past-len"]):
                return 409, b'{"error": "cache_miss"}', "application/json"
        try:
            held, (result, tensors) = self.stage.compute(step, frame.tensors, base)
        except StepFailed as error:
            return 400, json.dumps({"error": error.code, "message": error.message}).encode(), "application/json"
        if mode is not None and self.knows_cache:
            self.sessions[step.session] = held
        if self.json_tail and result.token_ids is not None:
            return 200, json.dumps({"token_id": result.token_ids[0]}).encode(), "application/json"
        if self.json_tail and result.text is not None:
            return 200, json.dumps({"text": result.text}).encode(), "application/json"
        result = replace(result, cached=self.knows_cache and mode is not None)
        return 200, b"".join(encode_frame(encode_header(result), tensors)), "application/octet-stream"


@contextlib.contextmanager
def running_http_node(layers: str, num_layers: int, model: str, **fields: Any) -> Iterator[HttpNode]:
    """A node that listens, until the block ends."""
    text_tail = bool(fields.pop("text_tail", False))
    node = HttpNode(Stage(LayerRange.parse(layers), num_layers, text_tail=text_tail), model, **fields)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer(200, json.dumps(node.describe()).encode(), "application/json")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._answer(*node.forward(self.headers, body))

        def _answer(self, status: int, content: bytes, content_type: str) -> None:
            if node.token is not None and self.headers.get("authorization") != f"Bearer {node.token}":
                status, content = 401, b"{}"
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", node.port), Handler) as server:
        node.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield node
        finally:
            server.shutdown()
            thread.join()
