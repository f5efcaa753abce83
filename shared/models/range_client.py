"""Byte ranges of files over HTTP: checked answer by answer, and continued where a connection broke."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import httpx

from shared.models.download import CONNECT_TIMEOUT_S, FRUITLESS_ATTEMPTS_MAX, READ_TIMEOUT_S, RETRY_WAIT_S
from shared.models.errors import ModelUnavailable
from shared.models.remote import RemoteFile, RemoteModel
from shared.models.spans import Span

CONNECTIONS_MAX: Final = 4
"""Requests at once: enough to fill a link whose round trip is long, few enough for a gateway that also serves chat."""
RETRY_AFTER_S_MAX: Final = 30.0
_REFUSED: Final = (401, 403)
_GONE: Final = (404, 410)
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Write = Callable[[int, bytes], None]
"""Takes bytes and the offset in the file at which they belong."""


def never() -> bool:
    """For callers who cancel nothing."""
    return False


class _Retry(Exception):
    """An attempt failed in a way that a new one may not.

    Args:
        reason: Why.
        wait_s: How long to wait first.
    """

    def __init__(self, reason: str, wait_s: float = RETRY_WAIT_S) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class RangeClient:
    """Reads byte ranges of one model's files. A context manager; safe to use from several threads at once.

    Args:
        model: Whose files.
        cancelled: Asked often; once true, `read` ends with an error.
        sleep: Waits between attempts.
    """

    def __init__(
        self, model: RemoteModel, *, cancelled: Callable[[], bool] = never, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._model = model
        self._cancelled = cancelled
        self._sleep = sleep
        self._failure: ModelUnavailable | None = None
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._http = httpx.Client(
            headers={**model.headers, "accept-encoding": "identity"},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
            follow_redirects=True,
            verify=model.tls or True,
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def abort(self, reason: BaseException) -> None:
        """End every `read`, with the same error if it is one of ours, else as cancelled. The first reason stays."""
        if self._failure is None:
            interrupted = ModelUnavailable("cancelled", "reading was interrupted")
            self._failure = reason if isinstance(reason, ModelUnavailable) else interrupted

    def read(self, file: RemoteFile, span: Span, write: Write) -> str:
        """Read a span, handing on its bytes in order, and give their sha256 in hexadecimal digits.

        Bytes whose answer proves damaged are handed on again.

        Raises:
            ModelUnavailable: `download_failed`, `unknown_model`, `ranges_unsupported`, `source_changed`, `cancelled`,
                and whatever `write` raises.
        """
        digest, start, fruitless = hashlib.sha256(), span.start, 0
        while start < span.end:
            self._check_wanted(file)
            answer = _Answer(start, span.end, digest.copy(), write)
            try:
                self._ask(file, answer)
            except (httpx.HTTPError, httpx.InvalidURL, _Retry) as error:
                fruitless = 0 if answer.position > start else fruitless + 1
                if fruitless >= FRUITLESS_ATTEMPTS_MAX:
                    reason = str(error) or type(error).__name__
                    message = f"reading {file.url} failed at byte {start:,}: {reason}; a new attempt goes on from there"
                    raise ModelUnavailable("download_failed", message) from error
                self._sleep(error.wait_s if isinstance(error, _Retry) else RETRY_WAIT_S)
            start, digest = answer.position, answer.digest
        return digest.hexdigest()

    def read_whole(self, file: RemoteFile) -> bytes:
        """Read a small file, and compare its hash.

        Raises:
            ModelUnavailable: As `read`; `hash_mismatch`.
        """
        content = bytearray(file.size_bytes)

        def write(offset: int, data: bytes) -> None:
            content[offset : offset + len(data)] = data

        self.read(file, Span(0, file.size_bytes), write)
        whole = bytes(content)
        file.check(whole)
        return whole

    def _ask(self, file: RemoteFile, answer: _Answer) -> None:
        """One request; what comes goes to `answer`, also if the connection breaks in the middle.

        Raises:
            httpx.HTTPError: The connection broke.
            _Retry: The server is busy or failing, or the bytes were damaged on the way.
            ModelUnavailable: Asking again would not help.
        """
        is_whole = (answer.start, answer.end) == (0, file.size_bytes)
        headers = {} if is_whole else {"range": f"bytes={answer.start}-{answer.end - 1}"}
        with self._http.stream("GET", file.url, headers=headers) as response:
            _check_status(response, file)
            self._check_unchanged(response, file)
            _check_range(response, file, Span(answer.start, answer.end))
            for chunk in response.iter_raw():
                self._check_wanted(file)
                answer.take(chunk)
            answer.check(response.headers.get("content-digest"))

    def _check_wanted(self, file: RemoteFile) -> None:
        failure = self._failure
        if failure is not None:
            raise ModelUnavailable(failure.code, failure.message, **failure.fields) from failure
        if self._cancelled():
            raise ModelUnavailable("cancelled", f"reading {file.name} was cancelled")

    def _check_unchanged(self, response: httpx.Response, file: RemoteFile) -> None:
        """Every answer for a file must be of the same file."""
        etag = response.headers.get("etag", "").removeprefix("W/")
        with self._lock:
            first = self._etags.setdefault(file.name, etag)
        if etag != first:
            message = f"{file.url} changed while it was being read: its ETag was {first}, now it is {etag}; try again"
            raise ModelUnavailable("source_changed", message, file=file.name)


class _Answer:
    """The bytes of one answer: where they belong, and their hashes.

    Args:
        start: Offset of the first byte asked for.
        end: Offset after the last.
        digest: Of everything before `start` in the same read; goes on from there.
        write: Where the bytes go.
    """

    def __init__(self, start: int, end: int, digest: Any, write: Write) -> None:
        self.start, self.end, self.position = start, end, start
        self.digest = digest
        self._before = digest.copy()
        self._own = hashlib.sha256()
        self._write = write

    def take(self, chunk: bytes) -> None:
        """Hand on what came.

        Raises:
            _Retry: More came than was asked for.
        """
        if len(chunk) > self.end - self.position:
            self._forget()
            raise _Retry("the server sent more than was asked for")
        self._write(self.position, chunk)
        self.position += len(chunk)
        self.digest.update(chunk)
        self._own.update(chunk)

    def check(self, content_digest: str | None) -> None:
        """Compare with what the server says of the whole answer (RFC 9530), if it does.

        Raises:
            _Retry: The bytes were damaged on the way, or are not all there.
        """
        if self.position < self.end:
            raise _Retry(f"the server sent {self.position - self.start} of {self.end - self.start} bytes")
        if content_digest is not None and content_digest != content_digest_of(self._own.digest()):
            self._forget()
            raise _Retry("the bytes are not those that the server hashed")

    def _forget(self) -> None:
        self.position, self.digest = self.start, self._before


def content_digest_of(sha256: bytes) -> str:
    """The value of a Content-Digest header (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def _check_status(response: httpx.Response, file: RemoteFile) -> None:
    status = response.status_code
    if status in _REFUSED:
        message = f"{file.url} answers {status}: it asks for another token, or for a licence that was not accepted"
        raise ModelUnavailable("download_failed", message)
    if status in _GONE:
        raise ModelUnavailable("unknown_model", f"{file.url} answers {status}: it is not there any more")
    if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
        message = f"{file.url} is shorter than the {file.size_bytes:,} bytes that it was announced with; try again"
        raise ModelUnavailable("source_changed", message, file=file.name)
    if status not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
        raise _Retry(f"the server answers {status}", _wait_s(response.headers.get("retry-after", "")))


def _wait_s(retry_after: str) -> float:
    return min(float(retry_after), RETRY_AFTER_S_MAX) if retry_after.isdecimal() else RETRY_WAIT_S


def _check_range(response: httpx.Response, file: RemoteFile, asked: Span) -> None:
    """Whether the answer is of the bytes asked for, of a file of the announced size, and not encoded."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ModelUnavailable("download_failed", f"{file.url} is sent in the encoding {encoding}, which was not asked")
    if response.status_code == httpx.codes.OK:
        if asked != (0, file.size_bytes):
            message = (
                f"{file.url} is sent whole by a server or proxy that ignores Range, so a part of it cannot be had: "
                "`meshnet pull` fetches the whole model"
            )
            raise ModelUnavailable("ranges_unsupported", message, file=file.name)
        announced = response.headers.get("content-length")
        if announced is not None and announced != str(file.size_bytes):
            raise _changed(file, f"it has {announced} bytes, not {file.size_bytes}")
        return
    given = response.headers.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(given)
    if match is None or (int(match[1]), int(match[2]) + 1) != asked:
        message = f"{file.url} was asked for bytes {asked.start}-{asked.end - 1} and answers with {given or 'none'!r}"
        raise ModelUnavailable("ranges_unsupported", message, file=file.name)
    if int(match[3]) != file.size_bytes:
        raise _changed(file, f"it has {match[3]} bytes, not {file.size_bytes}")


def _changed(file: RemoteFile, how: str) -> ModelUnavailable:
    message = f"{file.url} is not the file that was announced: {how}; try again"
    return ModelUnavailable("source_changed", message, file=file.name)
