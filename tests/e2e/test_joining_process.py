"""A joining node as a process over real weights: everything it needs is the gateway's address."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from shared.layers import LayerRange
from shared.messages import Drain, Unload
from shared.models.fingerprint import fingerprint
from tests.conftest import TinyModels
from tests.support.default_model import default_model_folder
from tests.support.fake_gateway import JoinedNode, running_gateway
from tests.support.fleet import REPO, ManagedProcess, child_env, wait_until

PROMPT = [5, 17, 42, 7, 99]
NUM_LAYERS = 6
END_TIMEOUT_S = 30.0


@contextmanager
def running_joiner(url: str, folder: Path, *arguments: str, name: str = "node") -> Iterator[ManagedProcess]:
    """A node process that joins, on one thread, with a cache of its own; ended with the block."""
    flags = ["--join", url, "--cache-dir", str(folder / "cache"), "--device", "cpu", "--threads", "1", *arguments]
    process = ManagedProcess(name, [sys.executable, "-m", "shard", *flags], folder / f"{name}.log", child_env())
    try:
        yield process
    finally:
        process.stop()


async def load(node: JoinedNode, layers: str, model: Path, num_layers: int = NUM_LAYERS) -> None:
    """Give the node a range of the model in a folder, by its fingerprint alone."""
    await node.load(layers, model=fingerprint(model), name="", num_layers=num_layers)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_life_of_a_joining_node(tiny_model: TinyModels, tmp_path: Path) -> None:
    """Load, steps, another range, a gateway that goes and comes back, unload, drain; and the same name afterwards."""
    model = tiny_model("qwen2")
    flags = ["--model", str(model), "--dtype", "float32", "--memory", "4G"]
    async with running_gateway() as gateway:
        port = int(gateway.url.split(":")[2].partition("/")[0])
        url = gateway.url
        with running_joiner(url, tmp_path, *flags) as process:
            node = await gateway.joined()
            machine = node.hello.machine
            assert machine is not None
            assert (machine.memory_bytes, machine.dtype, machine.models) == (4 << 30, "f32", (fingerprint(model),))
            assert machine.read_bytes_per_s > 0

            await load(node, "0:6", model)
            tokens = await node.generate("s", PROMPT, 6)
            assert len(set(tokens)) > 1
            whole = node.info.layers

            await load(node, "0:3", model)
            miss = await node.miss(await node.decode("s", tokens[-1], 10, layers=whole, sampling=None))
            assert miss.reason == "range_mismatch"
            assert not (await node.result(await node.prefill("half", PROMPT))).token_ids
            await load(node, "0:6", model)
            assert await node.generate("t", PROMPT, 6) == tokens

            await node.link.close()
            node = await gateway.joined()
            assert node.hello.node is not None
            assert (node.hello.node.layers, node.hello.node.state) == (LayerRange(0, 6), "ready")
            assert (await node.result(await node.decode("t", tokens[-1], 10))).cached

            await node.link.send(Unload())
            assert (await node.error(await node.prefill("u", PROMPT))).code == "not_ready"
            await load(node, "0:6", model)
            await node.link.send(Drain())
            assert process.process.wait(END_TIMEOUT_S) == 0, process.tail()
            first_log = process.log.read_text()
            assert first_log.count('"machine.measured') == 1
            was_remembered = '"machine.measured"' in first_log

        with running_joiner(url, tmp_path, *flags, name="again") as process:
            again = await gateway.joined()
            assert again.hello.peer == node.hello.peer
            assert again.hello.machine is not None
            assert again.hello.machine.models == machine.models
            # What was measured while other work had the processor is not remembered.
            assert (again.hello.machine == machine) == was_remembered
            assert ('"machine.measured' in process.log.read_text()) != was_remembered
    async with running_gateway(port=port) as gateway:
        with running_joiner(gateway.url, tmp_path, *flags, name="third") as process:
            await gateway.joined()
            process.process.terminate()
            assert process.process.wait(END_TIMEOUT_S) == 0, process.tail()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_nodes_of_a_machine_are_two(tmp_path: Path) -> None:
    """With one cache, and without a word about their names; what a gateway offers in vain they say."""
    async with running_gateway() as gateway:
        with (
            running_joiner(gateway.url, tmp_path, name="one"),
            running_joiner(gateway.url, tmp_path, name="two"),
        ):
            one, two = await gateway.joined(), await gateway.joined()
            assert one.hello.peer != two.hello.peer
            await one.ask("0:2", model="0123456789abcdef", name="no such model")
            failed = await one.loaded("failed")
            assert (failed.error or "").startswith("the model 0123456789abcdef (no such model) cannot be had: ")


def test_join_that_is_no_address_is_one_line() -> None:
    """Exit code 2 and the flag."""
    ended = subprocess.run(
        [sys.executable, "-m", "shard", "--join", "http://a/mesh"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPO,
        env=child_env(),
        check=False,
    )
    assert ended.returncode == 2
    assert "--join" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.real_model
@pytest.mark.timeout(300)
async def test_unload_gives_memory_back(tmp_path: Path) -> None:
    """What the weights took falls off the process; loading half of them takes half as much."""
    model = default_model_folder()
    async with running_gateway() as gateway:
        with running_joiner(gateway.url, tmp_path, "--model", str(model)) as process:
            node = await gateway.joined()
            rss = psutil.Process(process.process.pid).memory_info

            await load(node, "0:1", model, num_layers=24)
            small = rss().rss
            await load(node, "0:24", model, num_layers=24)
            await node.result(await node.prefill("s", PROMPT))
            whole = rss().rss
            assert whole - small > 500_000_000
            await node.link.send(Unload())
            wait_until(lambda: rss().rss < small + 0.1 * (whole - small), "memory back", 20.0)
