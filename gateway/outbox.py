"""What waits to leave over one node's link, and what is kept for a process whose link is down.

Whoever sends only puts a message here, so cancelling a sender leaves no half-sent frame, and what it sends while being
cancelled still leaves. A short message that nothing waits before leaves within the call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.open_link import OpenLink
from gateway.waits import Wait
from shared.errors import FrameError, LinkClosed, MeshError
from shared.messages import Cancel, Message, Release
from shared.tensor_spec import WireTensor

OUTBOX_MESSAGES_MAX = 4096
"""Far more than admitted sessions can have under way; over it the node does not read, and its link is closed."""
UNSENT_MAX = 256
"""Releases and cancels kept for a process whose link is down; beyond, its TTL frees the sessions."""

Entry = tuple[Message, Mapping[str, WireTensor] | None, Wait | None]


@dataclass(slots=True)
class Outbox:
    """The messages of one node, across its links.

    Args:
        name: Where they go, for errors.
    """

    name: str
    _link: OpenLink | None = None
    _entries: deque[Entry] = field(default_factory=deque)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _writer_rests: bool = False
    _unsent_pid: int = 0
    _unsent: deque[Message] = field(default_factory=lambda: deque(maxlen=UNSENT_MAX))

    def open(self, link: OpenLink, pid: int) -> None:
        """A link is there, to the process of this id; what was kept for that process leaves first."""
        self._link = link
        if pid == self._unsent_pid:
            for message in self._unsent:
                self.put(message)
        self._unsent.clear()

    def close(self, pid: int) -> None:
        """The link to the process of this id is gone: what ends sessions is kept for it, anything else is dropped.

        A node that holds no range yet does not say its id when the link is opened, only once it has sessions.
        """
        self._link = None
        self._unsent_pid = pid
        self._writer_rests = False
        self._unsent.extend(self.last_words())
        self._entries.clear()

    def keep(self, message: Release | Cancel) -> None:
        """Let a message wait for the process to come back into reach; for another process it means nothing."""
        if self._unsent_pid:
            self._unsent.append(message)

    def last_words(self) -> list[Message]:
        """Of what waits to leave, what ends sessions."""
        return [message for message, _, _ in self._entries if isinstance(message, Release | Cancel)]

    def put(self, message: Message, tensors: Mapping[str, WireTensor] | None = None, wait: Wait | None = None) -> None:
        """Send without waiting; a step's `wait` is told when it cannot be sent.

        Raises:
            LinkClosed: There is no link.
        """
        if self._link is None:
            raise LinkClosed("no_link", f"there is no link to {self.name}", url=self.name)
        if self._writer_rests and not self._entries and _sent_now(self._link, message, tensors):
            return
        self._entries.append((message, tensors, wait))
        self._filled.set()

    async def write(self, link: OpenLink) -> None:
        """Send what is put, one after the other, until cancelled.

        Raises:
            LinkClosed: The link is closed, or `outbox_full`: the node does not read.
        """
        while True:
            self._writer_rests = True
            await self._filled.wait()
            self._writer_rests = False
            self._filled.clear()
            while self._entries:
                if len(self._entries) > OUTBOX_MESSAGES_MAX:
                    raise LinkClosed("outbox_full", f"{self.name} does not read", limit=OUTBOX_MESSAGES_MAX)
                message, tensors, wait = self._entries[0]  # until it is sent: what ends a session must not be lost
                if wait is None:
                    await link.send(message, tensors)
                elif not wait.answer.done():
                    await _send_step(link, message, tensors, wait)
                self._entries.popleft()


def _sent_now(link: OpenLink, message: Message, tensors: Mapping[str, WireTensor] | None) -> bool:
    try:
        return link.send_now(message, tensors)
    except MeshError:
        return False  # the writer meets it again, and tells whoever waits


async def _send_step(link: OpenLink, message: Message, tensors: Mapping[str, WireTensor] | None, wait: Wait) -> None:
    try:
        await link.send(message, tensors)
    except FrameError as error:
        wait.fail(error)
