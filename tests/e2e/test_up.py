"""`meshnet up` with real processes: it serves, what it prints works as pasted, and nothing outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import TinyModels
from tests.support.fleet import REPO, child_env, free_port, wait_until

START_TIMEOUT_S = 100.0
END_TIMEOUT_S = 30.0
pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


@dataclass
class Up:
    """A running `meshnet up` and what it has printed."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int

    @property
    def text(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        """The gateway."""
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, words: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it has printed this."""

        def printed_or_ended() -> bool:
            if words in self.text:
                return True
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            return False

        wait_until(printed_or_ended, f"{words!r} in\n{self.text}", timeout_s)

    def family(self) -> list[psutil.Process]:
        """This process and everything below it."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def end(self) -> None:
        """Whatever a test has left."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = self.family()
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_TIMEOUT_S)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


def wait_gone(processes: list[psutil.Process], timeout_s: float = END_TIMEOUT_S) -> None:
    """Wait until none of them runs."""

    def all_gone() -> bool:
        return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)

    def gone() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return all_gone()
        return False

    wait_until(gone, f"the end of {processes}", timeout_s)


@contextlib.contextmanager
def running_up(
    model: Path, folder: Path, *flags: str, command: list[str] | None = None, env: dict[str, str] | None = None
) -> Iterator[Up]:
    """Start it, and end whatever is left of it."""
    port = free_port()
    log = folder / "up.log"
    own = [sys.executable, "-m", "shared.cli", "up", "--model", str(model), "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            own if command is None else [*command, f"PORT={port}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=REPO,
            env=child_env(
                MESHNET_CONTEXT_LEN="96",  # answers of a random model rarely end by themselves
                **(env or {}),
            ),
            start_new_session=True,  # a process group that a test may signal
        )
    up = Up(process, log, port)
    try:
        yield up
    finally:
        up.end()


def test_it_serves_and_what_it_prints_works_as_pasted(tiny_model: TinyModels, tmp_path: Path):
    """Three nodes; the curl and the Python snippet get an answer; SIGTERM ends everything with 0."""
    with running_up(tiny_model("llama"), tmp_path, "--nodes", "3", "--threads", "1") as up:
        up.wait_for("Ctrl-C ends every process.")
        for index, layers in enumerate(["0 to 1", "2 to 3", "4 to 5"]):
            assert re.search(rf"node-{index} +layers +{layers} +cpu f32, pid \d+", up.text)
        printed = up.text[up.text.index("ready after") :]
        assert f"base_url  {up.url}/v1" in printed
        curl = printed[printed.index("curl ") : printed.index("# --- in Python")]
        answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True)
        assert answer.stdout.rstrip().endswith("data: [DONE]")
        snippet = printed[printed.index("from openai") : printed.index("Ctrl-C")]
        subprocess.run([sys.executable, "-c", snippet], capture_output=True, timeout=60, check=True)
        family = up.family()
        assert len(family) == 5
        up.process.terminate()
        assert up.process.wait(END_TIMEOUT_S) == 0
        wait_gone(family)
        assert "gateway  | " in up.text
        assert "request.finished" in up.text


def test_it_serves_with_api_keys_and_another_name(tiny_model: TinyModels, tmp_path: Path):
    """It presents a key itself, beyond this machine too, and what it prints reads the key from the variable."""
    env = {
        "MESHNET_API_KEYS": "secret-1,secret-2",
        "MESHNET_HOST": "0.0.0.0",
        "MESHNET_MESH_TOKEN": "secret-3",
        "MESHNET_SERVED_MODEL_NAME": "foo",
    }
    with running_up(tiny_model("llama"), tmp_path, "--nodes", "1", env=env) as up:
        up.wait_for("Ctrl-C ends every process.")
        printed = up.text[up.text.index("ready after") :]
        assert "secret" not in printed
        environment = {**os.environ, "MESHNET_API_KEYS": env["MESHNET_API_KEYS"]}
        curl = printed[printed.index("curl ") : printed.index("# --- in Python")]
        answer = subprocess.run(
            ["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True, env=environment
        )
        assert answer.stdout.rstrip().endswith("data: [DONE]")
        snippet = printed[printed.index("import os") : printed.index("Ctrl-C")]
        subprocess.run([sys.executable, "-c", snippet], capture_output=True, timeout=60, check=True, env=environment)


def make_up(model: Path) -> list[str]:
    """`make up` as the Makefile runs it, in the environment of these tests."""
    stamps = ["-o", ".venv/.installed-run", f"VENV={Path(sys.executable).parent.parent}"]
    return ["make", "-s", *stamps, "up", f"MODEL={model}", "THREADS=1", "NODES=2"]


def test_a_signal_to_the_whole_group_is_one_wish_to_stop(tiny_model: TinyModels, tmp_path: Path):
    """`make` passes SIGTERM on to a process that has got it already; nodes still end in order."""
    model = tiny_model("llama")
    with running_up(model, tmp_path, command=make_up(model)) as up:
        up.wait_for("Ctrl-C ends every process.")
        family = up.family()
        os.killpg(up.process.pid, signal.SIGTERM)
        up.wait_for("stopping (")
        os.kill(family[1].pid, signal.SIGTERM)  # as make does, should the two above have become one
        up.process.wait(END_TIMEOUT_S)
        wait_gone(family)
        for node in ("node-0", "node-1"):  # one that is killed does not come to say so
            assert re.search(rf"{node} .*node\.stopped", up.text), up.text


def test_ctrl_c_during_the_start_ends_everything(tiny_model: TinyModels, tmp_path: Path):
    """Before the route is ready."""
    with running_up(tiny_model("llama"), tmp_path) as up:
        wait_until(lambda: len(up.family()) >= 3, "two nodes", START_TIMEOUT_S)
        family = up.family()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(END_TIMEOUT_S) in (0, 130)
        wait_gone(family)


def test_a_node_killed_in_mid_answer_comes_back_and_the_answer_goes_on(tiny_model: TinyModels, tmp_path: Path):
    """The same text as undisturbed; people are told what happened; SIGTERM still ends everything with 0."""
    flags = ("--nodes", "3", "--threads", "1", "--dtype", "float32")
    env = {"MESHNET_FAILOVER_TIMEOUT_SECONDS": "90"}
    with running_up(tiny_model("llama"), tmp_path, *flags, env=env) as up:
        up.wait_for("Ctrl-C ends every process.")
        nodes = {node["id"]: node["pid"] for node in httpx.get(f"{up.url}/mesh").json()["nodes"]}
        undisturbed = stream_text(up.url)
        disturbed = stream_text(up.url, lambda: os.kill(nodes["node-1"], signal.SIGKILL))
        assert disturbed == undisturbed
        up.wait_for("node-1 ended with signal SIGKILL; starting it again in 0.")
        up.wait_for("node-1 serves again, ")
        family = up.family()
        assert len(family) == 5
        up.process.terminate()
        assert up.process.wait(END_TIMEOUT_S) == 0
        wait_gone(family)


def stream_text(url: str, after_third: Callable[[], None] = lambda: None) -> str:
    """One greedy answer, streamed; something may be done after its third piece."""
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0}
    pieces: list[str] = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            pieces.append(chunk["choices"][0]["delta"].get("content") or "")
            if len(pieces) == 3:
                after_third()
    return "".join(pieces)


def test_a_node_that_keeps_dying_is_named_and_ends_the_rest(tiny_model: TinyModels, tmp_path: Path):
    """Five ends within a minute: with how it ended, and exit code 1."""
    with running_up(tiny_model("llama"), tmp_path, "--threads", "1") as up:
        up.wait_for("Ctrl-C ends every process.")
        family = up.family()
        for ends in range(1, 6):
            node = wait_until(lambda: running_node(up, "node-1"), "node-1", START_TIMEOUT_S)
            node.kill()
            if ends < 5:
                up.wait_for(f"({ends} of 5 ends")
        assert up.process.wait(END_TIMEOUT_S) == 1
        assert "error: node-1 ended 5 times within 60 s, the last time with signal SIGKILL. Its last lines:" in up.text
        wait_gone(family)


def running_node(up: Up, name: str) -> psutil.Process | None:
    """The node's process, found by its command line; None while there is none."""
    for process in up.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                return process
    return None


def test_the_demo_kills_a_node_and_ends_with_the_same_text(tiny_model: TinyModels, tmp_path: Path):
    """`meshnet demo` on a tiny model: it says what it does, ends with 0 and leaves nothing behind."""
    command = [sys.executable, "-m", "shared.cli", "demo", "--model", str(tiny_model("llama")), "--threads", "1"]
    command += ["--port", str(free_port()), "--max-tokens", "30"]
    demo = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150, cwd=REPO, env=child_env())
    assert demo.returncode == 0, demo.stderr + demo.stdout
    for words in ("✗ kill -9 ", "starting it again", "1 hop was rebuilt", "The same text, all "):
        assert words in demo.stdout


def test_a_setting_that_a_node_refuses_is_shown(tiny_model: TinyModels, tmp_path: Path):
    """The node's own words, not a timeout."""
    env = {"MESHNET_KV_MAX_BYTES": "900T"}
    with running_up(tiny_model("llama"), tmp_path, "--nodes", "1", env=env) as up:
        assert up.process.wait(START_TIMEOUT_S) == 1
        assert "error: node-0: layers 0:6 take " in up.text
        assert "lower --kv-max-bytes to at most" in up.text


def test_more_nodes_than_layers_are_refused(tiny_model: TinyModels, tmp_path: Path):
    """Said at once."""
    with running_up(tiny_model("llama"), tmp_path, "--nodes", "7") as up:
        assert up.process.wait(START_TIMEOUT_S) == 1
        assert "has 6 layers, so at most that many nodes, not 7" in up.text


@pytest.mark.parametrize("moment", ["starting", "serving"])
def test_the_death_of_what_started_it_ends_everything(tiny_model: TinyModels, tmp_path: Path, moment: str):
    """`make` killed by SIGKILL, the way the Makefile runs it, while nodes start and while they serve."""
    model = tiny_model("llama")
    with running_up(model, tmp_path, command=make_up(model)) as up:
        if moment == "serving":
            up.wait_for("Ctrl-C ends every process.")
        else:
            wait_until(lambda: len(up.family()) >= 4, "nodes under make", START_TIMEOUT_S)
        family = up.family()
        up.process.kill()
        wait_gone(family)


def test_its_own_death_ends_everything(tiny_model: TinyModels, tmp_path: Path):
    """SIGKILL leaves it no chance to tell its children."""
    with running_up(tiny_model("llama"), tmp_path, "--nodes", "1") as up:
        up.wait_for("Ctrl-C ends every process.")
        family = up.family()
        up.process.kill()
        wait_gone(family)


def test_a_device_that_is_not_there_is_one_sentence_before_anything_is_fetched(tmp_path: Path):
    """The model does not even exist: the device is looked at first."""
    command = [sys.executable, "-m", "shared.cli", "up", "--model", str(tmp_path / "none"), "--device", "cuda:99"]
    done = subprocess.run(
        [*command, "--port", str(free_port())],
        cwd=REPO,
        env=child_env(),
        text=True,
        capture_output=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: --device: 'cuda:99' cannot be used here: ")
    assert len(done.stderr.splitlines()) == 1
