"""What a hop adds beyond the stage's own compute, and what it puts on the wire.

A gateway's link to a real node in the middle of the model, one-token frames: the time from handing a step
to the link until its answer is there, less the compute that the node reports. Beside it the same round trip over
bare TCP, which no protocol can beat.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import bare_echo
from shared.frame import FrameLimits
from shared.layers import LayerRange
from shared.link import Link, dial
from shared.messages import Hello, Loaded, LoadProgress, NodeInfo, SamplingParams, Step, StepResult
from shared.models.folder import read_config
from shared.tensor_spec import ITEM_BYTES, WireTensor
from shared.version import SOFTWARE
from tests.support.fleet import ManagedProcess, child_env, free_port

STEPS = 300
FLOOR_STEPS = 100
TARGET_US = 400


async def open_link(port: int) -> tuple[Link, NodeInfo]:
    """Dial until the node listens, and wait until it is ready."""
    hello = Hello(versions=(1,), role="gateway", peer="benchmark", software=SOFTWARE)
    deadline = time.monotonic() + 60
    while True:
        try:
            link = await dial(f"ws://127.0.0.1:{port}", hello, limits=FrameLimits())
            break
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
    node = link.welcome.node
    assert node is not None
    while node.state != "ready":
        message, _ = await link.receive()
        if isinstance(message, Loaded):
            node = message.node
        elif not isinstance(message, LoadProgress):
            raise RuntimeError(f"unexpected {message.kind}")
    return link, node


async def ask(link: Link, step: Step, tensors: dict[str, WireTensor]) -> StepResult:
    """Send a step and take its answer."""
    await link.send(step, tensors)
    message, _ = await link.receive()
    if not isinstance(message, StepResult):
        raise RuntimeError(str(message))
    return message


def bytes_moved(link: Link) -> int:
    """Frame bytes of steps and their results, both ways."""
    return link.counters.sent_bytes["step"] + link.counters.received_bytes["step_result"]


async def measure(port: int, hidden_size: int) -> dict[str, Any]:
    """Prefill one position, then decode one position at a time."""
    link, node = await open_link(port)
    item_bytes = ITEM_BYTES[node.dtype]
    hidden = WireTensor(node.dtype, (1, 1, hidden_size), memoryview(bytes(hidden_size * item_bytes)))
    tensors = {"hidden_states": hidden}
    common: dict[str, Any] = {"session": "benchmark-hop", "layers": node.layers, "model": node.model}
    await ask(link, Step(step_index=0, cache="prefill", sampling=SamplingParams(temperature=0), **common), tensors)
    overheads_us, computes_us = [], []
    bytes_before = bytes_moved(link)
    for index in range(1, STEPS + 1):
        started_s = time.perf_counter()
        result = await ask(link, Step(step_index=index, cache="decode", past_len=index, **common), tensors)
        overheads_us.append((time.perf_counter() - started_s) * 1e6 - result.compute_us)
        computes_us.append(result.compute_us)
    frame_bytes = (bytes_moved(link) - bytes_before) / STEPS
    await link.close()
    hidden_bytes = hidden_size * item_bytes
    return {
        "layers": str(node.layers),
        "dtype": node.dtype,
        "overhead_us_p50": round(statistics.median(overheads_us)),
        "overhead_us_p99": round(statistics.quantiles(overheads_us, n=100)[98]),
        "compute_us_p50": round(statistics.median(computes_us)),
        "hidden_bytes": hidden_bytes,
        "frame_bytes_both_ways": round(frame_bytes),
        "overhead_bytes_both_ways": round(frame_bytes - 2 * hidden_bytes),
    }


def measure_floor(frame_bytes: int, sleep_us: int, folder: Path) -> dict[str, int]:
    """What bare TCP and a thread cost here for the same frame after the same pause."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.bare_echo", str(port), str(frame_bytes), str(sleep_us)]
    echo = ManagedProcess("echo", command, folder / "echo.log", child_env())
    try:
        took_s = uvloop.run(bare_echo.measure(port, frame_bytes, FLOOR_STEPS))
    finally:
        echo.stop()
    return {"bare_tcp_us_p50": round(statistics.median(took_s) * 1e6 - sleep_us)}


def run(model: Path) -> dict[str, Any]:
    """A middle hop of eight layers, bfloat16 and float32."""
    rows = []
    for dtype in ("bfloat16", "float32"):
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "shard", "--model", str(model), "--layers", str(LayerRange(8, 16))]
            command += ["--listen", f"127.0.0.1:{port}", "--dtype", dtype, "--threads", "1", "--exit-with-parent"]
            node = ManagedProcess("node", command, Path(folder) / "node.log", child_env())
            try:
                row = uvloop.run(measure(port, read_config(model).hidden_size))
            finally:
                node.stop()
            row |= measure_floor(row["frame_bytes_both_ways"] // 2, row["compute_us_p50"], Path(folder))
            rows.append(row)
    return {"rows": rows, "target_overhead_us_p50": TARGET_US}
