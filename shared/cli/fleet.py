"""A gateway and its nodes on this machine, from their start to their end: the work of `meshnet up`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import httpx

from shared.cli.children import Child, ChildFailed, start_child
from shared.cli.display import Display
from shared.cli.plan import UpSettings, gateway_command, node_command
from shared.layers import LayerRange
from shared.models.progress import Progress

POLL_INTERVAL_S: Final = 0.2
LISTEN_TIMEOUT_S: Final = 120.0
"""A node listens before it loads, but a cold disk makes its imports slow."""
STALL_TIMEOUT_S: Final = 180.0
"""How long loading may show no progress: the first read of a cold disk, and what follows the last byte."""
HTTP_TIMEOUT_S: Final = 5.0
LISTENING: Final = "listening on "
STARTING: Final = "Starting processes"

T = TypeVar("T")


class StartStalled(Exception):
    """The route did not become ready, and nothing moved any more."""


class LocalFleet:
    """Starts the processes, waits for the route, and says when one of them ends.

    Args:
        settings: What the user asked for.
        ranges: The layers of each node.
        threads: Compute threads of each node.
        show_line: Gets each line of a child's output.
    """

    def __init__(
        self,
        settings: UpSettings,
        ranges: list[LayerRange],
        threads: int,
        show_line: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._ranges = ranges
        self._threads = threads
        self._show_line = show_line
        self._urls: dict[str, str] = {}
        self._listening = asyncio.Event()
        self._ended: asyncio.Queue[tuple[Child, int]] = asyncio.Queue()
        self._followers: set[asyncio.Task[None]] = set()
        self._loading: dict[str, int] = {}
        self.children: list[Child] = []

    async def start(self, display: Display) -> None:
        """Start the nodes, learn where they listen, and start the gateway on top.

        Raises:
            ChildFailed: A process ended instead.
            StartStalled: A node does not listen.
        """
        display.show(Progress(STARTING, unit="steps"))
        for index, layers in enumerate(self._ranges):
            await self._start(f"node-{index}", node_command(self._settings, index, layers, self._threads))
        try:
            async with asyncio.timeout(LISTEN_TIMEOUT_S):
                await self._unless_failed(self._listening.wait())
        except TimeoutError as error:
            raise StartStalled(f"not every node listens after {LISTEN_TIMEOUT_S:.0f} s") from error
        urls = [self._urls[f"node-{index}"] for index in range(len(self._ranges))]
        await self._start("gateway", gateway_command(self._settings, urls))

    async def wait_ready(self, display: Display) -> dict[str, Any]:
        """Show how far each node has loaded until the whole route exists, and return the mesh's figures.

        Raises:
            ChildFailed: A process ended instead.
            StartStalled: Nothing has moved for `STALL_TIMEOUT_S`.
        """
        return await self._unless_failed(self._poll(display))

    async def wait_failure(self) -> None:
        """Wait until a process ends, which none should.

        Raises:
            ChildFailed: Always.
        """
        child, code = await self._ended.get()
        raise ChildFailed(child.name, code, child.tail)

    async def stop(self) -> None:
        """End the gateway, so that it stops asking, then the nodes; all at once if called again."""
        order = [[child] for child in self.children if child.name == "gateway"]
        order.append([child for child in self.children if child.name != "gateway"])
        for group in order:
            await asyncio.gather(*(child.stop() for child in group))
        await asyncio.gather(*self._followers, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to every process."""
        for child in self.children:
            child.send(signal.SIGKILL)

    async def _start(self, name: str, command: list[str]) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        child = await start_child(name, command, env, self._on_line)
        self.children.append(child)
        follower = asyncio.create_task(self._follow(child), name=f"follow {name}")
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)

    async def _follow(self, child: Child) -> None:
        code = await child.follow()
        self._ended.put_nowait((child, code))

    def _on_line(self, name: str, line: str) -> None:
        if line.startswith(LISTENING) and name not in self._urls:
            self._urls[name] = line.removeprefix(LISTENING)
            if len(self._urls) == len(self._ranges):
                self._listening.set()
            return
        self._show_line(name, line)

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work, or raise as soon as a process ends."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self.wait_failure())
        try:
            await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                await failing
            return await working
        finally:
            for task in (working, failing):
                task.cancel()
            await asyncio.gather(working, failing, return_exceptions=True)

    async def _poll(self, display: Display) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        seen: object = None
        moved_at = loop.time()
        headers = authorization(self._settings.api_key)
        async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False, headers=headers) as client:
            while True:
                mesh = await _get_mesh(client, self._settings.base_url)
                progress = self._show_loading(mesh, display)
                if mesh.get("ready"):
                    return mesh
                if progress != seen:
                    seen, moved_at = progress, loop.time()
                if loop.time() - moved_at > STALL_TIMEOUT_S:
                    reason = mesh.get("reason") or "the gateway does not answer"
                    raise StartStalled(f"nothing has moved for {STALL_TIMEOUT_S:.0f} s: {reason}")
                await asyncio.sleep(POLL_INTERVAL_S)

    def _show_loading(self, mesh: dict[str, Any], display: Display) -> list[object]:
        """Show each node's bytes; what is returned changes whenever something has moved.

        A node that has loaded gives no figures any more, so what was its total ends its bar.
        """
        moved: list[object] = []
        for node in mesh.get("nodes", ()):
            progress = node.get("load_progress") or {}
            moved.append((node.get("state"), progress.get("done_bytes")))
            if node.get("id") is None:
                continue
            display.show(Progress(STARTING, 1, 1, "steps"))
            title = _load_title(node)
            if node["state"] == "loading" and progress:
                self._loading[title] = progress["total_bytes"]
                display.show(Progress(title, progress["done_bytes"], progress["total_bytes"]))
            elif node["state"] == "ready" and title in self._loading:
                total_bytes = self._loading.pop(title)
                display.show(Progress(title, total_bytes, total_bytes))
        return moved


def authorization(api_key: str | None) -> dict[bytes, bytes]:
    """The header that presents a key, where one is needed."""
    return {} if api_key is None else {b"authorization": f"Bearer {api_key}".encode()}


async def _get_mesh(client: httpx.AsyncClient, base_url: str) -> dict[str, Any]:
    """GET /mesh; only a reason while the gateway answers otherwise, empty while it does not answer yet."""
    with contextlib.suppress(httpx.TransportError):
        response = await client.get(f"{base_url}/mesh")
        if response.is_success:
            return dict(response.json())
        return {"reason": f"GET {base_url}/mesh answers {response.status_code}"}
    return {}


def _load_title(node: dict[str, Any]) -> str:
    start, end = node["layers"]
    return f"Loading layers {start} to {end - 1} on {node['id']}"
