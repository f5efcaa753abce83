"""A gateway and its nodes on this machine, from their start to their end: the work of `meshnet up`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx

from shared.cli.children import Child, ChildFailed, describe_exit, start_child
from shared.cli.display import Display
from shared.cli.environment import API_KEY_VARIABLES
from shared.cli.plan import UpSettings, gateway_command, node_command
from shared.cli.restarts import ENDS_MAX, WINDOW_S, Restarts
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
GATEWAY: Final = "gateway"

T = TypeVar("T")


class StartStalled(Exception):
    """The route did not become ready, and nothing moved any more."""


class LocalFleet:
    """Starts the processes, waits for the route, and keeps the nodes running.

    Until the route is ready, the end of any process is a failure: most likely a setting is wrong. Within `keep_running`
    a node that ends is started again on its old port, where the gateway finds it.

    Args:
        settings: What the user asked for.
        ranges: The layers of each node.
        threads: Compute threads of each node.
        show_line: Gets each line of a child's output.
        say: Gets what people should know of restarts.
    """

    def __init__(
        self,
        settings: UpSettings,
        ranges: list[LayerRange],
        threads: int,
        show_line: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._ranges = {f"node-{index}": layers for index, layers in enumerate(ranges)}
        self._threads = threads
        self._show_line = show_line
        self._say = say
        self._urls: dict[str, str] = {}
        self._listening = asyncio.Event()
        self._failures: asyncio.Queue[Exception] = asyncio.Queue()
        self._keepers: set[asyncio.Task[None]] = set()
        self._loading: dict[str, int] = {}
        self._restarting = False
        self._stopping = asyncio.Event()
        self._children: dict[str, Child] = {}

    def pid(self, name: str) -> int:
        """The process id of ``gateway`` or of ``node-0``, ``node-1`` and so on."""
        return self._children[name].pid

    async def start(self, display: Display) -> None:
        """Start the nodes, learn where they listen, and start the gateway on top.

        Raises:
            ChildFailed: A process ended instead.
            StartStalled: A node does not listen.
        """
        display.show(Progress(STARTING, unit="steps"))
        for name in self._ranges:
            await self._start(name)
        try:
            async with asyncio.timeout(LISTEN_TIMEOUT_S):
                await self._unless_failed(self._listening.wait())
        except TimeoutError as error:
            raise StartStalled(f"not every node listens after {LISTEN_TIMEOUT_S:.0f} s") from error
        await self._start(GATEWAY)

    async def wait_ready(self, display: Display) -> dict[str, Any]:
        """Show how far each node has loaded until the whole route exists, and return the mesh's figures.

        Raises:
            ChildFailed: A process ended instead.
            StartStalled: Nothing has moved for `STALL_TIMEOUT_S`.
        """
        return await self._unless_failed(self._poll(display))

    async def keep_running(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work; from now on nodes that end are started again, until something cannot go on.

        Raises:
            ChildFailed: The gateway ended, or a node has ended `ENDS_MAX` times within `WINDOW_S`.
            OSError: A process cannot be started.
        """
        self._restarting = True
        return await self._unless_failed(work)

    async def stop(self) -> None:
        """End the gateway, so that it stops asking, then the nodes; nothing is started any more."""
        self._stopping.set()
        nodes = [child for name, child in self._children.items() if name != GATEWAY]
        for group in ([self._children[GATEWAY]] if GATEWAY in self._children else [], nodes):
            await asyncio.gather(*(child.stop() for child in group))
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to every process."""
        self._stopping.set()
        for child in self._children.values():
            child.send(signal.SIGKILL)

    def _command(self, name: str) -> list[str]:
        """How a process is started; a node that has listened before does so again at the same place."""
        if name == GATEWAY:
            return gateway_command(self._settings, [self._urls[node] for node in self._ranges])
        listen = urlsplit(self._urls[name]).netloc if name in self._urls else "127.0.0.1:0"
        index = list(self._ranges).index(name)
        return node_command(self._settings, index, self._ranges[name], self._threads, listen)

    async def _start(self, name: str) -> None:
        child = await self._spawn(name)
        keeper = asyncio.create_task(self._keep(name, child), name=f"keep {name}")
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)

    async def _spawn(self, name: str) -> Child:
        hidden = () if name == GATEWAY else API_KEY_VARIABLES
        env = {variable: value for variable, value in os.environ.items() if variable not in hidden}
        env |= {"OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        self._children[name] = await start_child(name, self._command(name), env, self._on_line)
        return self._children[name]

    async def _keep(self, name: str, child: Child) -> None:
        """Follow a process, and those that take its place, to the last one's end."""
        restarts = Restarts(Random())  # noqa: S311 - jitter is no secret
        while True:
            code = await child.follow()
            if self._stopping.is_set():
                return
            try:
                await self._wait_to_restart(child, code, restarts)
                if self._stopping.is_set():
                    return
                child = await self._spawn(name)
            except (ChildFailed, OSError) as error:
                self._failures.put_nowait(error)
                return
            if self._stopping.is_set():  # `stop` and `kill` did not see this one
                child.send(signal.SIGKILL)
            self._keepers.add(telling := asyncio.create_task(self._tell_return(child)))
            telling.add_done_callback(self._keepers.discard)

    async def _wait_to_restart(self, child: Child, code: int, restarts: Restarts) -> None:
        """Wait as long as is due before a process is started again.

        Raises:
            ChildFailed: It is not to be started again.
        """
        if not self._restarting or child.name == GATEWAY:
            raise ChildFailed(child.name, code, child.tail)
        delay_s = restarts.count_end(asyncio.get_running_loop().time())
        if delay_s is None:
            raise ChildFailed(child.name, code, child.tail, f"{ENDS_MAX} times within {WINDOW_S:.0f} s, the last time")
        count = f"{restarts.recent} of {ENDS_MAX} ends that {WINDOW_S:.0f} s may have"
        self._say(f"{child.name} ended with {describe_exit(code)}; starting it again in {delay_s:.1f} s ({count})")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _tell_return(self, child: Child) -> None:
        """Say when a node that was started again serves; nothing if it ends before."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        url = f"http://{urlsplit(self._urls[child.name]).netloc}/readyz"
        async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False) as client:
            while child.is_running and not self._stopping.is_set():
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(url)).is_success:
                        self._say(f"{child.name} serves again, {loop.time() - began_s:.1f} s after its new start")
                        return
                await asyncio.sleep(POLL_INTERVAL_S)

    def _on_line(self, name: str, line: str) -> None:
        if line.startswith(LISTENING) and name in self._ranges:
            self._urls.setdefault(name, line.removeprefix(LISTENING))
            if len(self._urls) == len(self._ranges):
                self._listening.set()
            return
        self._show_line(name, line)

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work, or raise as soon as a process ends."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self._failures.get())
        try:
            await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
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
