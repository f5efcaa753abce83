"""What a link carries: measured once after a node has joined, with bytes that come back, while no session is there.

A probe is answered at once by the node's event loop, so what it takes beyond an empty one is the way of its bytes,
there and back: the sum that a planner divides by a link's bandwidth. It begins small, so that a slow link is not held
up, and grows while an answer comes too soon to be told from chance. Each size is tried twice, since a connection that
has rested sends its first bytes slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import structlog

from gateway.waiting import wait_first
from shared.clock import Clock
from shared.messages import PROBE_BYTES_MAX, Probe
from shared.tensor_spec import WireTensor

SIZES_BYTES: Final = (16 * 1024, 256 * 1024, PROBE_BYTES_MAX)
"""Payloads, each way. At worst each of the larger takes 16 times `LONG_ENOUGH_S`."""
LONG_ENOUGH_S: Final = 0.008
"""What an answer must take beyond an empty one's time to be a measurement, and not the noise of two event loops."""
LEAST_S: Final = 0.0001
"""What the largest is taken to take at least: noise can make an empty one the slower."""
TRIES: Final = 2
ANSWER_S_MAX: Final = 5.0
"""A node that has not answered a probe by then does not answer any."""
TRY_AGAIN_S: Final = 0.25
"""After something else needed the link."""
PAYLOAD: Final = "payload"

Send = Callable[[Probe, Mapping[str, WireTensor]], int]
"""Sends a probe without waiting; gives the mark that its answer proves to have arrived."""

log = structlog.stdlib.get_logger(__name__)


class Disturbed(Exception):
    """Something else needed the link meanwhile."""


class Unanswered(Exception):
    """The node does not know probes, or does not answer this one."""


@dataclass(slots=True)
class Probing:
    """The probe of one node that is under way.

    Args:
        clock: Time.
    """

    clock: Clock
    _seq: int = 0
    _size: int = 0
    _sent_mark: int = 0
    _answered: asyncio.Future[float | None] | None = None

    async def run(self, url: str, send: Send, is_idle: Callable[[], bool]) -> float | None:
        """Measure as soon as nobody else needs the link; None where the node does not answer.

        Args:
            url: Of the node, for the log.
            send: As of `measure`.
            is_idle: As of `measure`.
        """
        while True:
            try:
                bytes_per_s = await self.measure(send, is_idle)
            except Disturbed:
                await self.clock.sleep(TRY_AGAIN_S)
            except Unanswered:
                log.info("link.unmeasured", url=url, reason="the node answers no probes")
                return None
            else:
                log.info("link.measured", url=url, bytes_per_s=round(bytes_per_s))
                return bytes_per_s

    async def measure(self, send: Send, is_idle: Callable[[], bool]) -> float:
        """Bytes per second, both ways taken together.

        Args:
            send: Sends.
            is_idle: Whether nobody else needs the link; asked before and after each probe.

        Raises:
            Disturbed: Somebody does.
            Unanswered: There will be no figure.
        """
        empty_s = await self._least_s(0, send, is_idle)
        size, took_s = 0, 0.0
        for size in SIZES_BYTES:
            took_s = await self._least_s(size, send, is_idle) - empty_s
            if took_s >= LONG_ENOUGH_S:
                break
        return 2 * size / max(took_s, LEAST_S)

    def take(self, reply: Probe, tensors: Mapping[str, WireTensor]) -> int | None:
        """A probe is answered. Gives the mark of what has arrived; None for one that nobody waits for."""
        if self._answered is None or self._answered.done() or reply.seq != self._seq:
            return None
        is_whole = sum(tensor.data.nbytes for tensor in tensors.values()) == self._size
        self._answered.set_result(self.clock.monotonic() if is_whole else None)
        return self._sent_mark

    def fail(self) -> None:
        """The node says that it does not know probes."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    async def _least_s(self, size: int, send: Send, is_idle: Callable[[], bool]) -> float:
        return min([await self._ask(size, send, is_idle) for _ in range(TRIES)])

    async def _ask(self, size: int, send: Send, is_idle: Callable[[], bool]) -> float:
        if not is_idle():
            raise Disturbed
        self._seq, self._size = self._seq + 1, size
        self._answered = asyncio.get_running_loop().create_future()
        noise = Random(self._seq).randbytes(size)  # noqa: S311 - only must not be compressible
        tensors = {PAYLOAD: WireTensor("u8", (size,), memoryview(noise))} if size else {}
        asked_at = self.clock.monotonic()
        self._sent_mark = send(Probe(seq=self._seq), tensors)
        await wait_first(self.clock, ANSWER_S_MAX, self._answered)
        answered_at = self._answered.result() if self._answered.done() else None
        self._answered = None
        if answered_at is None:
            raise Unanswered
        if not is_idle():
            raise Disturbed
        return answered_at - asked_at
