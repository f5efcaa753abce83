"""HTTP as uvicorn reads it, with limits on what a connection may cost before anybody is asked for a key.

uvicorn bounds neither a request's head nor the time that it takes, nor the number of connections. Here they are
bounded, and what is refused has the shape of every other error: an OpenAI body and an ``x-request-id``. After a
refusal the connection is half-closed and what still comes is dropped for a while: closing at once would reset it,
and with it the answer that its client has not read yet.

A request may ask to switch to another protocol (Java's client offers HTTP/2 in each). Only a node that joins is given
what it asks for, a WebSocket (`gateway.link_listener`); any other such request is read again without that wish: the
parser would take its body for the other protocol's bytes.
"""

from __future__ import annotations

from asyncio import BaseTransport, TimerHandle
from dataclasses import dataclass
from typing import Any, ClassVar

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http_refusals import RefusalLog, not_http, too_many_connections, whole_response
from gateway.link_listener import LINK_PATH, LinkListener
from gateway.openai_errors import ApiError
from gateway.request_record import choose_request_id

HEAD_BYTES_MAX = 64 << 10
"""Method, URL and headers: what SDKs send is under 2 KiB, what proxies let through mostly under 16."""
HEAD_S = 15.0
"""From a connection's first moment, or a later request's first byte, to the end of the head."""
LINGER_S = 1.0
"""How long a refused connection is read and dropped, so that its answer arrives."""
LINGER_BYTES_MAX = 16 << 20
REFUSING_MAX = 64
"""So many connections over the limit are told why; further ones are only closed."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a connection may cost.

    Args:
        connections_max: Open connections; more are answered 503.
        head_bytes_max: URL and headers of a request; also trailers, and whatever else is neither head nor body.
        head_s: How long a head may take.
    """

    connections_max: int
    head_bytes_max: int = HEAD_BYTES_MAX
    head_s: float = HEAD_S


class HttpProtocol(HttpToolsProtocol):
    """One connection. Made by uvicorn from the class that `create_protocol` returns."""

    limits: ClassVar[HttpLimits]
    refusals: ClassVar[RefusalLog]
    links: ClassVar[LinkListener | None]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.url = b""
        self._in_head = False
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._made_progress = False
        self._head_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._fault: ApiError | None = None
        self._is_refused = False
        self._dropped_bytes = 0

    def connection_made(self, transport: BaseTransport) -> None:
        """Take the connection, or refuse it where there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]
        most = self.limits.connections_max
        if len(self.connections) <= most:
            self._await_head()
            return
        self.refusals.add(self.loop.time(), connections_max=most)
        if len(self.connections) > most + REFUSING_MAX:
            self._is_refused = True
            self.transport.abort()
            return
        self._refuse(too_many_connections(most))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_head_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; what belongs to no request any more is dropped."""
        if self._is_refused:
            self._drop(data)
            return
        self._unset_keepalive_if_required()
        while data and not self._is_refused:
            data = self._parse(data)

    def _parse(self, data: bytes) -> bytes:
        """Parse; returns what is to be parsed next."""
        self._made_progress = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            return self._become_link(rest) if self._asks_for_link() else self._without_upgrade(rest)
        except httptools.HttpParserError:
            self._refuse(self._fault or not_http())
            return b""
        self._unparsed_bytes = 0 if self._made_progress else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > self.limits.head_bytes_max:
            self._refuse(self._head_too_large())
        elif self._head_timer is None and (self._in_head or self.cycle is None or self.cycle.response_complete):
            self._await_head()
        return b""

    def on_message_begin(self) -> None:
        """A request's first byte was read."""
        super().on_message_begin()
        self._in_head = self._made_progress = True
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the URL."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or trailer."""
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: the request is served from here on."""
        self._in_head, self._made_progress = False, True
        if not self.parser.should_upgrade():
            self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._made_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._made_progress = True
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Whether to leave the request alone, as uvicorn does before it hands it over: it is read again instead."""
        return True

    def _asks_for_link(self) -> bool:
        """Whether a node joins, with no earlier request still owed an answer."""
        return (
            self.links is not None
            and self.scope["method"] == "GET"
            and self.url.partition(b"?")[0] == LINK_PATH
            and self._get_upgrade() == b"websocket"
            and (self.cycle is None or self.cycle.response_complete)
        )

    def _become_link(self, rest: bytes) -> bytes:
        """Hand the connection over, or refuse it while it is still HTTP.

        Args:
            rest: What followed the head.
        """
        assert self.links is not None  # noqa: S101 - see `_asks_for_link`
        refusal = self.links.refusal(self.client[0] if self.client else "")
        if refusal is not None:
            self._refuse(refusal)
            return b""
        self._stop_head_timer()
        self.connections.discard(self)
        head = [b"GET %b HTTP/1.1\r\n" % self.url, *(b"%b: %b\r\n" % header for header in self.headers)]
        self.links.take(self.transport, b"".join([*head, b"\r\n", rest]))
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """The request whose head was just read as one that asks for no other protocol, for a fresh parser.

        Args:
            rest: What followed the head.
        """
        method = self.scope["method"]
        if method == "CONNECT":
            self._refuse(ApiError(405, "This server is no proxy.", code="method_not_allowed"))
            return b""
        version = self.scope["http_version"].encode()
        head = [b"%b %b HTTP/%b\r\n" % (method.encode(), self.url, version)]
        for name, value in self.headers:
            kept = without_upgrade(value) if name == b"connection" else value
            if name != b"upgrade" and (kept or name != b"connection"):
                head.append(b"%b: %b\r\n" % (name, kept))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"".join([*head, b"\r\n", rest])

    def _count_head(self, size: int) -> None:
        self._made_progress = True
        self._head_bytes += size
        if self._head_bytes > self.limits.head_bytes_max:
            self._fault = self._head_too_large()
            raise self._fault

    def _head_too_large(self) -> ApiError:
        most = self.limits.head_bytes_max
        if len(self.url) > most // 2:
            return ApiError(414, f"The URL of your request is longer than {most} bytes.", code="url_too_long")
        return ApiError(431, f"The headers of your request are larger than {most} bytes.", code="headers_too_large")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_s, self._on_head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_late(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:
            self._await_head()
        elif self._in_head:
            message = f"The head of your request did not arrive within {self.limits.head_s:g} s."
            self._refuse(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Read no more, and answer so; after the answers that are still owed to earlier requests, close."""
        self._is_refused = True
        self._stop_head_timer()
        request_id = choose_request_id({})
        log.info("request.refused", request_id=request_id, status=error.status, error=error.code)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            return
        if cycle is not None and not cycle.response_complete and (cycle.response_started or self.pipeline):
            self.transport.close()
            return
        self.transport.write(whole_response(error, request_id))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _drop(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > LINGER_BYTES_MAX and self._linger_timer is not None:
            self.transport.close()


def create_protocol(limits: HttpLimits, links: LinkListener | None = None) -> type[HttpProtocol]:
    """The class that uvicorn makes one server's connections from; `links` takes those of nodes that join."""
    return type("LimitedHttpProtocol", (HttpProtocol,), {"limits": limits, "refusals": RefusalLog(), "links": links})


def without_upgrade(connection: bytes) -> bytes:
    """A ``Connection`` header's value without what asks for another protocol."""
    options = [option.strip() for option in connection.split(b",")]
    return b", ".join(option for option in options if option.lower() not in (b"upgrade", b"http2-settings"))
