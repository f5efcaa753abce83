"""`meshnet up`: one command from nothing to a served model on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import click

from shared.cli.children import ChildFailed
from shared.cli.display import Display, open_display
from shared.cli.fleet import LocalFleet, StartStalled
from shared.cli.plan import UpSettings, threads_per_node
from shared.cli.signals import Wishes, interrupt_on_stop_signals, stop_signals
from shared.cli.welcome import ready_text
from shared.layers import LayerRange, split_evenly
from shared.models.errors import ModelUnavailable
from shared.models.folder import ModelFolder, read_config
from shared.models.source import resolve_model

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class WorkFailed(Exception):
    """What a fleet was started for did not come out as it must; says what."""


def run_up(settings: UpSettings) -> int:
    """Fetch the model, start everything, serve until a signal or a failure, end everything.

    Returns:
        The exit code: 0 when a signal ended it, 1 when a process could not be kept running, 130 when interrupted
        before it served.

    Raises:
        click.ClickException: What the user asked for cannot be had; says why.
    """
    started_at = time.monotonic()

    async def serve(_fleet: LocalFleet, mesh: dict[str, Any]) -> None:
        output.verbose = True
        click.echo(ready_text(settings, mesh, time.monotonic() - started_at))
        await asyncio.Event().wait()

    output = Output(verbose=settings.log_level == "debug")
    return run_fleet(settings, serve, output)


def run_fleet(settings: UpSettings, work: FleetWork, output: Output) -> int:
    """Fetch the model, start everything, do the work until it ends, a signal comes or a failure; end everything.

    Args:
        settings: What to start.
        work: What is done once the route is ready; nodes that end meanwhile are started again.
        output: Where the processes' lines go, and what is said of them.

    Returns:
        As `run_up`.

    Raises:
        click.ClickException: What the user asked for cannot be had; says why.
    """
    wishes = Wishes()
    interrupt_on_stop_signals(wishes)
    try:
        require_free_port(settings.host, settings.port)
        require_device(settings.device)
        with open_display() as display:
            model = _find_model(settings, display)
        ranges = _ranges(model, settings.nodes)
        return asyncio.run(_serve(settings, ranges, work, output, wishes))
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED


def require_free_port(host: str, port: int) -> None:
    """Whether the gateway will be able to listen, asked before minutes are spent on the rest.

    Raises:
        click.ClickException: Naming the port and how to choose another.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(infos[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(infos[0][4])
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {host} port {port} ({error.strerror or error}); "
            f"choose another: make up PORT={port + 1}, or meshnet up --port {port + 1}"
        ) from error


def require_device(device: str) -> None:
    """Whether nodes will be able to compute there, asked of torch, which this program does without.

    Raises:
        click.ClickException: Naming the device and what is wrong with it.
    """
    if device in ("auto", "cpu"):
        return
    command = [sys.executable, "-m", "shard.device_check", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own interpreter
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the check ended with exit code {done.returncode}"]
        raise click.ClickException(f"--device: {lines[-1].removeprefix('error: ')}")


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_model(settings: UpSettings, display: Display) -> ModelFolder:
    try:
        return resolve_model(settings.model, cache_dir=settings.cache_dir, progress=display.show)
    except ModelUnavailable as error:
        raise click.ClickException(error.message) from error


def _ranges(model: ModelFolder, nodes: int) -> list[LayerRange]:
    num_layers = read_config(model.path).num_layers
    if nodes > num_layers:
        raise click.ClickException(f"{model.name} has {num_layers} layers, so at most that many nodes, not {nodes}")
    return split_evenly(num_layers, nodes)


async def _serve(
    settings: UpSettings, ranges: list[LayerRange], work: FleetWork, output: Output, wishes: Wishes
) -> int:
    threads = settings.threads or threads_per_node(usable_cores(), len(ranges))
    fleet = LocalFleet(settings, ranges, threads, output.child_line, output.say)
    async with stop_signals(wishes) as signals:
        serving = asyncio.create_task(_start_and_work(fleet, output, work))
        stopping = asyncio.create_task(signals.get())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            click.echo(f"\nstopping ({stopping.result().name}; once more to end at once) …", err=True)
        try:
            await _stop_all(fleet, signals, serving)
        finally:
            stopping.cancel()
        return EXIT_FAILED if _has_failed(serving) else 0


async def _start_and_work(fleet: LocalFleet, output: Output, work: FleetWork) -> None:
    """Start, and do the work while nodes that end are started again, until that does not help."""
    with open_display() as display:
        output.display = display
        await fleet.start(display)
        mesh = await fleet.wait_ready(display)
    output.display = None
    await fleet.keep_running(work(fleet, mesh))


async def _stop_all(fleet: LocalFleet, signals: asyncio.Queue[signal.Signals], serving: asyncio.Task[None]) -> None:
    """End every process in order; a further signal ends them at once."""
    serving.cancel()
    await asyncio.wait({serving})
    stopping = asyncio.create_task(fleet.stop())
    again = asyncio.create_task(signals.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if again.done():
        fleet.kill()
    again.cancel()
    await stopping


def _has_failed(serving: asyncio.Task[None]) -> bool:
    """Whether serving ended by itself; then the reason is printed."""
    if serving.cancelled():
        return False
    error = serving.exception()
    if isinstance(error, ChildFailed) and (reason := error.reason()):
        click.echo(f"\nerror: {error.name}: {reason}", err=True)
    elif isinstance(error, ChildFailed):
        click.echo(f"\nerror: {error}. Its last lines:", err=True)
        for line in error.tail or ["(it printed nothing)"]:
            click.echo(f"  {line}", err=True)
    elif isinstance(error, StartStalled | WorkFailed):
        click.echo(f"\nerror: {error}", err=True)
    elif error is not None:
        raise error
    return error is not None


class Output:
    """Where lines go: the children's nowhere while bars are drawn, unless asked for; then to standard error.

    Args:
        verbose: Show the children's lines also while starting.
    """

    def __init__(self, *, verbose: bool) -> None:
        self.verbose = verbose
        self.display: Display | None = None

    def child_line(self, name: str, line: str) -> None:
        """Show a line with its process's name before it."""
        if self.verbose:
            self._write(f"{name:<8} | {line}")

    def say(self, line: str) -> None:
        """Show a line of our own, always."""
        self._write(f"{'meshnet':<8} | {line}")

    def _write(self, text: str) -> None:
        if self.display is not None:
            self.display.say(text)
        else:
            click.echo(text, file=sys.stderr)


FleetWork = Callable[[LocalFleet, dict[str, Any]], Coroutine[Any, Any, None]]
"""Gets the fleet, and its ``GET /mesh`` when it became ready."""
