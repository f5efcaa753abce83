"""The gateway alone: two nodes that answer at once, and 1, 8 and 64 concurrent streams through it.

The nodes hash instead of computing, in processes of their own; the client counts bytes and does no more.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from shared.models.fingerprint import fingerprint
from shared.models.folder import read_config
from tests.support.fleet import Fleet, ManagedProcess, child_env, free_port

STREAMS = (1, 8, 64)
TOKENS_PER_RUN = 6400
VOCAB_SIZE = 151_936
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


async def stream_once(port: int, tokens: int, seed: int) -> int:
    """One sampled stream over a bare socket; returns its completion tokens."""
    body = json.dumps(
        {
            "model": "default",
            "messages": [{"role": "user", "content": "Count the waves."}],
            "max_tokens": tokens,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = ["POST /v1/chat/completions HTTP/1.1", "host: benchmark", "content-type: application/json"]
    head += [f"content-length: {len(body)}", "connection: close", "", ""]
    writer.write("\r\n".join(head).encode() + body)
    tail = b""
    while data := await reader.read(65536):
        tail = (tail + data)[-2048:]
    writer.close()
    if b'"completion_tokens":' not in tail:
        raise RuntimeError(tail.decode(errors="replace"))
    usage = tail[tail.rindex(b'"completion_tokens":') + 20 :]
    return int(usage[: usage.index(b",")])


async def measure(port: int, gateway_pid: int, streams: int) -> dict[str, Any]:
    """All streams at once."""
    tokens = TOKENS_PER_RUN // streams
    cpu_before_s, started_s = cpu_seconds(gateway_pid), time.perf_counter()
    counts = await asyncio.gather(*(stream_once(port, tokens, seed) for seed in range(streams)))
    wall_s, cpu_s = time.perf_counter() - started_s, cpu_seconds(gateway_pid) - cpu_before_s
    return {
        "streams": streams,
        "tokens": sum(counts),
        "tokens_s": round(sum(counts) / wall_s),
        "gateway_cpu_us_per_token": round(cpu_s / sum(counts) * 1e6),
    }


def run(model: Path) -> dict[str, Any]:
    """Two hops, as in the default fleet."""
    num_layers = read_config(model).num_layers
    half = num_layers // 2
    ports = [free_port(), free_port()]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for node_port, layers in zip(ports, (f"0:{half}", f"{half}:{num_layers}"), strict=True):
            command = [sys.executable, "-m", "tests.support.fake_node", "--listen", f"127.0.0.1:{node_port}"]
            command += ["--layers", layers, "--num-layers", str(num_layers), "--vocab-size", str(VOCAB_SIZE)]
            command += ["--fingerprint", fingerprint(model), "--kv-max-sessions", str(max(STREAMS))]
            command += ["--kv-max-bytes", str(1 << 30)]
            processes.append(ManagedProcess(layers, command, Path(folder) / f"{node_port}.log", child_env()))
        command = [sys.executable, "-m", "gateway", "--model", str(model), "--port", str(port), "--exit-with-parent"]
        command += [flag for node_port in ports for flag in ("--node", f"ws://127.0.0.1:{node_port}")]
        gateway = ManagedProcess("gateway", command, Path(folder) / "gateway.log", child_env())
        try:
            Fleet(f"http://127.0.0.1:{port}", gateway, processes).wait_ready()
            uvloop.run(measure(port, gateway.pid, 4))
            rows = [uvloop.run(measure(port, gateway.pid, streams)) for streams in STREAMS]
        finally:
            for process in [gateway, *processes]:
                process.stop()
    return {"hops": 2, "rows": rows}
