"""`meshnet plan` as a process: what it prints is what a fleet can be started with."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shared.layers import LayerRange
from shared.models.measure import measure_model
from shared.planning.chain import LAST
from shared.planning.cost import CostModel
from shared.planning.fleet import Demand
from tests.conftest import TinyModels
from tests.support.fleet import REPO, child_env

FLEET = """
machines:
  - {{name: desk, memory: {memory}, runtime_memory: 1, decode_ms_per_layer: 1, prefill_ms_per_layer_per_token: 0.01}}
  - {{name: lab, memory: {memory}, runtime_memory: 1, decode_ms_per_layer: 2, prefill_ms_per_layer_per_token: 0.01}}
  - {{name: attic, address: "127.0.0.1:9007", memory: 4G, decode_ms_per_layer: 300, rtt_ms: 40, device: cpu}}
"""
SMALL = ("--sessions", "1", "--context-len", "64", "--prompt-len", "32")
TIMEOUT_S = 60


def run_plan(machines: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "shared.cli", "plan", "--machines", str(machines), *flags]
    return subprocess.run(
        command, cwd=REPO, env=child_env(**env), text=True, capture_output=True, timeout=TIMEOUT_S, check=False
    )


@pytest.fixture
def fleet(tiny_model: TinyModels, tmp_path: Path) -> Path:
    """Two machines that hold four of the six layers each, and one that holds all and is slow."""
    costs = CostModel(measure_model(tiny_model("llama")), Demand(sessions=1, context_len=64))
    four = LayerRange(2, 6)
    path = tmp_path / "fleet.yaml"
    needed = costs.weights_bytes(four) + costs.kv_bytes(four) + costs.working_bytes(LAST)
    path.write_text(FLEET.format(memory=needed + 1))
    return path


def check_start(command: list[str]) -> None:
    """The program that the command names takes every flag of it."""
    from gateway.__main__ import command as gateway
    from shard.__main__ import command as shard

    program = {"gateway": gateway, "shard": shard}[command[1]]
    program.make_context(command[1], command[2:]).close()


def test_a_plan_is_explained_and_its_commands_are_what_the_programs_take(tiny_model: TinyModels, fleet: Path):
    """Ranges, memory, times, the machine left out and why, and commands that parse."""
    done = run_plan(fleet, "--model", str(tiny_model("llama")), *SMALL)
    assert done.returncode == 0, done.stderr
    assert "6 layers on 2 hops" in done.stdout
    assert "lab  layers 0:2" in done.stdout
    assert "desk  layers 2:6" in done.stdout
    assert "attic  left out" in done.stdout
    assert "export MESHNET_MESH_TOKEN=" in done.stdout
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("meshnet ")]
    assert [command[1] for command in commands] == ["shard", "shard", "gateway"]
    for command in commands:
        check_start(command)


def test_json_holds_the_same_plan_for_programs(tiny_model: TinyModels, fleet: Path):
    """Ranges abut from 0 to the model's end; every machine stands in it once."""
    done = run_plan(fleet, "--model", str(tiny_model("llama")), *SMALL, "--json")
    data = json.loads(done.stdout)
    bounds = [stage["layers"] for stage in data["stages"]]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == 6
    assert bounds[0][1] == bounds[1][0]
    assert {stage["machine"] for stage in data["stages"]} == {"desk", "lab"}
    assert [left["machine"] for left in data["left_out"]] == ["attic"]
    assert data["ttft_ms"] > 0
    check_start(data["gateway_command"])


def test_settings_are_variables_too(tiny_model: TinyModels, fleet: Path):
    """As for every other command."""
    done = run_plan(
        fleet,
        *SMALL,
        MESHNET_MODEL=str(tiny_model("qwen2")),
        MESHNET_OBJECTIVE="throughput",
        MESHNET_PLAN_JSON="1",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["objective"] == "throughput"


def test_lengths_follow_the_model_unless_given(tiny_model: TinyModels, tmp_path: Path):
    """The tiny models were trained for 2,048 positions, half of what a plan takes by itself."""
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.format(memory="1G"))
    data = json.loads(run_plan(path, "--model", str(tiny_model("llama")), "--json").stdout)
    assert (data["context_len"], data["prompt_len"]) == (2048, 512)
    short = json.loads(run_plan(path, "--model", str(tiny_model("llama")), "--json", "--context-len", "64").stdout)
    assert (short["context_len"], short["prompt_len"]) == (64, 64)


@pytest.mark.parametrize(
    ("content", "flags", "sentence"),
    [
        (
            "machines: [{name: a, memory: 1G, decode_ms_per_layer: -1}]",
            (),
            "machines[0] (a).decode_ms_per_layer: must be",
        ),
        (
            "machines: [{name: a, memory: 513M, decode_ms_per_layer: 1}]",
            ("--sessions", "4000"),
            "add memory or machines",
        ),
        (
            FLEET.format(memory="1G"),
            ("--context-len", "4096"),
            "--context-len: the model was trained for 2048 tokens, not 4096",
        ),
        (
            FLEET.format(memory="1G"),
            ("--prompt-len", "65"),
            "--prompt-len: 65 tokens do not fit the 64 of --context-len",
        ),
        (FLEET.format(memory="1G"), ("--sessions", "0"), "'--sessions'"),
    ],
)
def test_what_cannot_be_planned_ends_with_one_sentence(
    tiny_model: TinyModels, tmp_path: Path, content: str, flags: tuple[str, ...], sentence: str
):
    """The field or flag and its limit, no traceback."""
    path = tmp_path / "fleet.yaml"
    path.write_text(content)
    done = run_plan(path, "--model", str(tiny_model("llama")), *SMALL, *flags)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
