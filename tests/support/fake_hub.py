"""A Hugging Face hub and a Python package index on loopback, with faults that a test can order.

It speaks what `huggingface_hub` asks for a model: revision with the files' sizes and hashes, tree, and files with ETag,
Range and HEAD. Weights are large files, which have a sha256; all others have git's hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
from collections import defaultdict
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
    stall_once_sent: dict[str, int] = field(default_factory=dict)
    """By path: once so many bytes of it have been sent in all, send nothing more until `released`."""
    ignores_ranges: bool = False
    """Send whole files whatever is asked for."""
    damaged: dict[str, int] = field(default_factory=dict)
    """By path: flip a bit in so many of the next answers."""
    failing: dict[str, list[int]] = field(default_factory=dict)
    """By path: answer with these statuses first."""
    changes_after: dict[str, int] = field(default_factory=dict)
    """By path: after so many answers the ETag is another."""
    shrunk: dict[str, int] = field(default_factory=dict)
    """By path: the file is shorter than the list of files says."""
    redirects: dict[str, str] = field(default_factory=dict)
    """By path: the server that has the bytes, as the hub sends its callers to another host for large files."""
    delay_s: float = 0.0
    """Before each answer."""
    commit: str = COMMIT
    """What `main` is at; files are those of this commit alone unless `history` has others."""
    history: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Files by earlier commit."""
    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of bodies sent, by path."""
    missing: set[str] = field(default_factory=set)
    """Paths answered by 404."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range of each request."""
    headers: list[Message] = field(default_factory=list)
    """Headers of each request."""
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ranges(self, path: str) -> list[str | None]:
        """The Range headers with which a file's bytes were asked for."""
        return [header for method, asked, header in self.requests if method == "GET" and asked.endswith(path)]

    def downloads(self, path: str) -> int:
        """How often a file's bytes were asked for."""
        return len(self.ranges(path))

    def move_to(self, commit: str, files: dict[str, dict[str, bytes]]) -> None:
        """Let `main` be another commit with other files; the one before stays."""
        self.history[self.commit] = self.files
        self.commit, self.files = commit, files

    def _files_at(self, revision: str, repo: str) -> dict[str, bytes] | None:
        current = revision in (self.commit, "main")
        return (self.files if current else self.history.get(revision, {})).get(repo)

    def find(self, path: str) -> tuple[bytes, str] | None:
        """The content at a path and its type."""
        if match := re.fullmatch(r"/api/models/(.+)/revision/([^/]+)", path):
            files = self._files_at(match[2], match[1])
            commit = self.commit if match[2] == "main" else match[2]
            siblings = [_sibling(name, content) for name, content in (files or {}).items()]
            return None if files is None else self._json({"id": match[1], "sha": commit, "siblings": siblings})
        if match := re.fullmatch(r"/api/models/(.+)/tree/[^/]+", path):
            entries = self.files.get(match[1], {})
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
                for name, content in entries.items()
            ]
            return self._json(tree)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            content = (self._files_at(match[2], match[1]) or {}).get(match[3])
            return None if content is None else (content, "application/octet-stream")
        if match := re.fullmatch(r"/simple/([^/]+)/", path):
            stem = match[1].replace("-", "_")
            links = [f'<a href="/wheels/{name}">{name}</a>' for name in self.wheels if name.startswith(f"{stem}-")]
            return f"<html><body>{''.join(links)}</body></html>".encode(), "text/html"
        if path.startswith("/wheels/") and path.removeprefix("/wheels/") in self.wheels:
            return self.wheels[path.removeprefix("/wheels/")], "application/octet-stream"
        return None

    def etag(self, path: str, content: bytes) -> str:
        """The file's ETag: its hash, or after a change that a test has ordered another."""
        is_large = path.endswith(".safetensors")
        etag = hashlib.sha256(content).hexdigest() if is_large else git_oid(content)
        if path in self.changes_after:
            self.changes_after[path] -= 1
            return "changed" if self.changes_after[path] < 0 else etag
        return etag

    def damage(self, path: str, body: bytes) -> bytes:
        """The body, with a bit flipped where a test has ordered that."""
        if not self.damaged.get(path) or not body:
            return body
        self.damaged[path] -= 1
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]

    @staticmethod
    def _json(value: Any) -> tuple[bytes, str]:
        return json.dumps(value).encode(), "application/json"


def git_oid(content: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it with `blobs=true`."""
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_oid(content)}
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
    return entry


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
        time.sleep(self.hub.delay_s)
        if self.hub.failing.get(path):
            self._send_empty(self.hub.failing[path].pop(0))
            return
        if path in self.hub.redirects:
            self._send_empty(302, ("Location", self.hub.redirects[path] + path))
            return
        found = None if path in self.hub.missing else self.hub.find(path)
        if found is None:
            self._send_empty(404, ("X-Error-Code", "RepoNotFound" if path.startswith("/api") else "EntryNotFound"))
            return
        content, kind = found
        etag = self.hub.etag(path, content)
        content = content[: self.hub.shrunk.get(path, len(content))]
        start, end = self._range(len(content))
        if start >= end > 0:
            self._send_empty(416, ("Content-Range", f"bytes */{len(content)}"))
            return
        is_part = (start, end) != (0, len(content))
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(end - start))
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.end_headers()
        if with_body:
            self._send_body(path, self.hub.damage(path, content[start:end]))

    def _send_empty(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", "0")):
            self.send_header(name, value)
        self.end_headers()

    def _range(self, size: int) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None or self.hub.ignores_ranges:
            return 0, size
        return int(match[1]), min(int(match[2]) + 1, size) if match[2] else size

    def _send_body(self, path: str, body: bytes) -> None:
        cuts = self.hub.cut_after.get(path)
        if cuts:
            self._write(path, body[: cuts.pop(0)])
            self.close_connection = True
            return
        limit = self.hub.stall_after.get(path)
        if self.hub.sent[path] >= self.hub.stall_once_sent.get(path, sys.maxsize):
            limit = 0
        if limit is not None and not self.hub.released.is_set():
            self._write(path, body[:limit])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.released.wait(60)
            body = body[limit:]
        self._write(path, body)

    def _write(self, path: str, data: bytes) -> None:
        with self.hub.lock:
            self.hub.sent[path] += len(data)
        self.wfile.write(data)


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
