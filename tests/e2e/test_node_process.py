"""A node as a process: settings, signals, its parent's death, weights that cannot be loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

from shared.messages import Drain, Loaded
from tests.support.fleet import REPO, ManagedProcess, child_env, wait_until
from tests.support.node_client import connected
from tests.support.tiny_models import build_tiny_model

START_TIMEOUT_S = 60.0
PROMPT = [5, 17, 42, 7, 99]
WHOLE_FAKE = ["--layers", "0:4", "--num-layers", "4"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of six layers."""
    return build_tiny_model("qwen2", tmp_path_factory.mktemp("tiny"))


@contextmanager
def running(module: str, arguments: list[str], folder: Path, name: str = "node") -> Iterator[ManagedProcess]:
    """A node process, ended with the block."""
    command = [sys.executable, "-m", module, "--listen", "127.0.0.1:0", *arguments]
    process = ManagedProcess(name, command, folder / f"{name}.log", child_env())
    try:
        yield process
    finally:
        process.stop()


def running_shard(model: Path, layers: str, folder: Path, *arguments: str) -> AbstractContextManager[ManagedProcess]:
    """A real node on one thread in float32."""
    flags = ["--model", str(model), "--layers", layers, "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    return running("shard", [*flags, *arguments], folder)


def url_of(process: ManagedProcess) -> str:
    """Where a process listens, once it says so."""

    def find() -> str | None:
        assert process.process.poll() is None, process.tail()
        found = re.search(r"listening on (ws://\S+)", process.log.read_text())
        return found[1] if found else None

    return str(wait_until(find, "listening", START_TIMEOUT_S))


def ready_url_of(process: ManagedProcess) -> str:
    """Where a process listens, once it serves."""
    url = url_of(process)
    base = url.replace("ws://", "http://")

    def is_ready() -> bool:
        assert process.process.poll() is None, process.tail()
        return httpx.get(base + "/readyz").status_code == 200

    wait_until(is_ready, "ready", START_TIMEOUT_S)
    return url


def exit_code(process: ManagedProcess, timeout_s: float = 20.0) -> int:
    """The code with which a process ends by itself."""
    return process.process.wait(timeout_s)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- loading --------------------------------------------------------------------------------------


def damage(model: Path, folder: Path) -> Path:
    """A copy of a model that lacks one tensor."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    header_bytes = int.from_bytes(weights.read_bytes()[:8], "little")
    header = json.loads(weights.read_bytes()[8 : 8 + header_bytes])
    name = next(name for name in header if "layers.0.mlp.up_proj" in name)
    header[name.replace("up_proj", "up_gone")] = header.pop(name)
    encoded = json.dumps(header).encode()
    weights.write_bytes(len(encoded).to_bytes(8, "little") + encoded + weights.read_bytes()[8 + header_bytes :])
    return folder


async def test_node_whose_weights_are_damaged_fails_clearly(tiny_model: Path, tmp_path: Path) -> None:
    """It listens, says over its links why it cannot load, logs it, and ends with 1."""
    with running_shard(damage(tiny_model, tmp_path / "damaged"), "0:6", tmp_path) as process:
        async with connected(url_of(process)) as client:
            loaded, _ = await client.receive(Loaded)
            assert loaded.node.state == "failed"
            assert "up_proj" in (loaded.error or "")
        assert exit_code(process) == 1
        assert "node.failed" in process.log.read_text()


async def test_node_that_promises_more_memory_than_there_is_reads_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """It says what it would take, over its links and in its last line, and ends with 1."""
    with running_shard(tiny_model, "0:3", tmp_path, "--kv-max-bytes", "900T") as process:
        async with connected(url_of(process)) as client:
            loaded, _ = await client.receive(Loaded)
            assert "921600 GiB for sessions (--kv-max-bytes)" in (loaded.error or "")
        assert exit_code(process) == 1
        log = process.log.read_text()
        assert "stage.memory" in log
        assert "stage.loading" not in log
        assert log.splitlines()[-1].startswith("error: layers 0:3 take ")


# --- signals and parents --------------------------------------------------------------------------


async def test_sigterm_drains_and_ends_with_zero(tmp_path: Path) -> None:
    """Links hear of it, the open session goes on, and its release ends the process."""
    with running("tests.support.fake_node", [*WHOLE_FAKE, "--drain-seconds", "20"], tmp_path) as process:
        async with connected(ready_url_of(process)) as client:
            await client.result(await client.prefill("s", PROMPT))
            process.process.terminate()
            await client.receive(Drain)
            assert (await client.result(await client.decode("s", 1, 5))).cached
        assert exit_code(process) == 0, process.tail()


async def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Who cannot wait for the drain says so again."""
    arguments = [*WHOLE_FAKE, "--drain-seconds", "600", "--step-ms", "600000"]
    with running("tests.support.fake_node", arguments, tmp_path) as process:
        async with connected(ready_url_of(process)) as client:
            await client.prefill("s", PROMPT)
            process.process.send_signal(signal.SIGINT)
            await client.receive(Drain)
            process.process.send_signal(signal.SIGTERM)
            assert exit_code(process) == 128 + signal.SIGTERM


async def test_sigterm_while_loading_ends_with_zero(tmp_path: Path) -> None:
    """Loading stops at its next report of progress."""
    with running("tests.support.fake_node", [*WHOLE_FAKE, "--load-s", "600"], tmp_path) as process:
        url_of(process)
        process.process.terminate()
        assert exit_code(process) == 0, process.tail()


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_node_ends_with_its_parent(signal_number: int, tmp_path: Path, tiny_model: Path) -> None:
    """Also when the parent is killed, and also while torch is being imported."""
    command = [sys.executable, "-m", "shard", "--model", str(tiny_model), "--layers", "0:6", "--listen", "127.0.0.1:0"]
    with (tmp_path / "log").open("w") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *command, "--exit-with-parent"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=REPO,
            env=child_env(),
        )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline().split()[0])
        assert is_alive(pid)
        parent.send_signal(signal_number)
        parent.wait()
        try:
            wait_until(lambda: not is_alive(pid), "the node's end", 15.0)
        finally:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


# --- settings -------------------------------------------------------------------------------------


def run_shard(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a node that should end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "shard", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPO,
        env=child_env(**env),
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--model", "MODEL"], {}, "--layers"),
        (["--model", "MODEL", "--layers", "0:7"], {}, "--layers: 0:7 ends after the model's last layer: it has 6"),
        (["--model", "/nowhere/at/all", "--layers", "0:6"], {}, "--model"),
        (["--model", "MODEL", "--layers", "0:6", "--listen", "0.0.0.0:0"], {}, "--listen: 0.0.0.0:0 is beyond"),
        (["--model", "MODEL", "--layers", "0:6"], {"MESHNET_KV_MAX_BYTES": "lots"}, "--kv-max-bytes"),
    ],
)
def test_bad_setting_is_one_line_that_names_it(
    arguments: list[str], env: dict[str, str], says: str, tiny_model: Path
) -> None:
    """Exit code 2, the flag, the reason, no traceback."""
    ended = run_shard(*(str(tiny_model) if each == "MODEL" else each for each in arguments), **env)
    assert ended.returncode == 2, ended.stderr
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stderr.startswith("error: ")


def test_address_in_use_is_one_line_that_names_it(tiny_model: Path, tmp_path: Path) -> None:
    """Two nodes cannot listen on one port."""
    with running("tests.support.fake_node", WHOLE_FAKE, tmp_path) as process:
        address = url_of(process).removeprefix("ws://")
        ended = run_shard("--model", str(tiny_model), "--layers", "0:6", "--listen", address, "--log-level", "error")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: --listen: {address}")
    assert len(ended.stderr.strip().splitlines()) == 1
