"""Dials one node again and again, and serves each link that comes of it."""

from __future__ import annotations

from dataclasses import replace

import structlog

from gateway.http_link import dial_http
from gateway.node_link import NodeLink
from gateway.open_link import Dial, OpenLink
from shared.backoff import Backoff
from shared.clock import Clock
from shared.errors import MeshError
from shared.mesh_access import MeshAccess
from shared.messages import Hello

HTTP_SCHEMES = ("http://", "https://")

log = structlog.stdlib.get_logger(__name__)


class Dialler:
    """How the link to a node that listens comes about.

    Args:
        link: The node; its `url` is dialled.
        hello: What the gateway says of itself.
        dial: Opens a link.
        clock: Time.
        backoff: Delays between attempts.
    """

    def __init__(self, link: NodeLink, *, hello: Hello, dial: Dial, clock: Clock, backoff: Backoff) -> None:
        self._link = link
        self._hello = hello
        self._dial = dial
        self._clock = clock
        self._backoff = backoff

    async def run(self) -> None:
        """Keep the link up until cancelled, whatever goes wrong with it: other nodes' links must not end with it."""
        while True:
            try:
                await self._dial_and_serve()
            except Exception:
                log.exception("node.link_failed", url=self._link.url)
            await self._clock.sleep(self._backoff.next_delay_s())

    async def _dial_and_serve(self) -> None:
        try:
            link = await self._dial(self._link.url, self._hello)
        except MeshError as error:
            self._link.note_failure(error)
        else:
            self._backoff.reset()
            await self._link.serve(link)


def dialling(access: MeshAccess) -> Dial:
    """What opens a link to an address, by its scheme: a WebSocket, or requests of HTTP."""

    async def dial(url: str, hello: Hello) -> OpenLink:
        if url.startswith(HTTP_SCHEMES):
            hello = replace(hello, token=access.tokens.presented())
            return await dial_http(url, hello, context=access.dial_context)
        return await access.dial(url, hello)

    return dial
