"""A Hugging Face hub and a Python package index on loopback, with faults that a test can order.

It speaks what `huggingface_hub` asks for a model: revision, tree, and files with ETag, Range and HEAD.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the server has, what it was asked, and how it should fail.

    Args:
        files: Content by repository and path, such as ``{"org/tiny": {"config.json": b"{}"}}``.
        wheels: Content by file name, under ``/simple/<project>/``.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    wheels: dict[str, bytes] = field(default_factory=dict)
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    """By path: send so many bytes of the next answers' bodies, then close the connection."""
    stall_after: dict[str, int] = field(default_factory=dict)
    """By path: send so many bytes, and the rest once `released`."""
    ignores_ranges: bool = False
    """Send whole files whatever is asked for."""
    missing: set[str] = field(default_factory=set)
    """Paths answered by 404."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range of each request."""
    headers: list[Message] = field(default_factory=list)
    """Headers of each request."""
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def ranges(self, path: str) -> list[str | None]:
        """The Range headers with which a file's bytes were asked for."""
        return [header for method, asked, header in self.requests if method == "GET" and asked.endswith(path)]

    def downloads(self, path: str) -> int:
        """How often a file's bytes were asked for."""
        return len(self.ranges(path))

    def find(self, path: str) -> tuple[bytes, str] | None:
        """The content at a path and its type."""
        if match := re.fullmatch(r"/api/models/(.+)/revision/[^/]+", path):
            return self._json({"id": match[1], "sha": COMMIT, "siblings": []}) if match[1] in self.files else None
        if match := re.fullmatch(r"/api/models/(.+)/tree/[^/]+", path):
            entries = self.files.get(match[1], {})
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in entries.items()
            ]
            return self._json(tree)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.files.get(match[1], {}).get(match[2])
            return None if content is None else (content, "application/octet-stream")
        if match := re.fullmatch(r"/simple/([^/]+)/", path):
            stem = match[1].replace("-", "_")
            links = [f'<a href="/wheels/{name}">{name}</a>' for name in self.wheels if name.startswith(f"{stem}-")]
            return f"<html><body>{''.join(links)}</body></html>".encode(), "text/html"
        if path.startswith("/wheels/") and path.removeprefix("/wheels/") in self.wheels:
            return self.wheels[path.removeprefix("/wheels/")], "application/octet-stream"
        return None

    @staticmethod
    def _json(value: Any) -> tuple[bytes, str]:
        return json.dumps(value).encode(), "application/json"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.headers.append(self.headers)
        found = None if path in self.hub.missing else self.hub.find(path)
        if found is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if path.startswith("/api") else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, kind = found
        start = self._range_start(len(content))
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self._send_body(path, content[start:])

    def _range_start(self, size: int) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        return min(int(match[1]), size) if match and not self.hub.ignores_ranges else 0

    def _send_body(self, path: str, body: bytes) -> None:
        cuts = self.hub.cut_after.get(path)
        if cuts:
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
            return
        limit = self.hub.stall_after.get(path)
        if limit is not None and not self.hub.released.is_set():
            self.wfile.write(body[:limit])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.released.wait(60)
            body = body[limit:]
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is what some tests are about."""


@contextlib.contextmanager
def running_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve the hub on a port that the kernel chooses."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
