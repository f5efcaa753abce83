"""Commands of a plan: where nodes listen, what they are told, and that nothing needs quoting twice."""

from __future__ import annotations

import shlex

import pytest

from shared.models.facts import LayerFacts, ModelFacts, SlotFacts
from shared.planning.commands import NodeAddress, StartCommands
from shared.planning.fleet import Demand, Machine
from shared.planning.plan import plan_fleet
from shared.planning.units import duration_text, size_text

MODEL = ModelFacts(
    layers=(LayerFacts(1000, 1000, SlotFacts(4)),) * 4,
    embedding_bytes=0,
    head_bytes=0,
    is_tied=False,
    shared_bytes=0,
    hidden_bytes=64,
)
MACHINE = Machine(name="a", memory_bytes=100_000, decode_s_per_layer=0.001, runtime_bytes=1000)
PLAN = plan_fleet(MODEL, [MACHINE], Demand(sessions=2, context_len=10))


def start(address: NodeAddress, model: str = "default", dtype: str = "auto", quantize: str = "none") -> StartCommands:
    """Commands for the plan's one machine."""
    addresses = {"a": address}
    return StartCommands(model=model, dtype=dtype, quantize=quantize, addresses=addresses, context_len=10, sessions=2)


@pytest.mark.parametrize(
    ("address", "listen"),
    [
        ("127.0.0.1:9005", "127.0.0.1:9005"),
        ("localhost:9005", "localhost:9005"),
        ("[::1]:9005", "[::1]:9005"),
        ("desk.lan:9005", "0.0.0.0:9005"),
    ],
)
def test_a_node_listens_where_the_gateway_reaches_it(address: str, listen: str):
    """On its own loopback only if that is where it is dialled."""
    command = start(NodeAddress(address)).node(PLAN.stages[0].primary)
    assert command[command.index("--listen") + 1] == listen


def test_a_node_may_fill_what_the_plan_leaves_with_caches():
    """Weights and runtime are taken off, the sessions' caches are not."""
    command = start(NodeAddress("a:9001")).node(PLAN.stages[0].primary)
    assert command[command.index("--kv-max-bytes") + 1] == str(100_000 - 1000 - 4000 - 20)  # 20: a slot that grows
    assert command[command.index("--kv-max-sessions") + 1] == "2"


def test_device_and_precision_are_said_only_where_chosen():
    """A node chooses well by itself."""
    bare = start(NodeAddress("a:9001")).node(PLAN.stages[0].primary)
    assert not {"--device", "--dtype", "--quantize"} & set(bare)
    quantized = start(NodeAddress("a:9001"), quantize="int4").node(PLAN.stages[0].primary)
    assert quantized[-2:] == ["--quantize", "int4"]
    command = start(NodeAddress("a:9001", "cuda:1"), dtype="float32").node(PLAN.stages[0].primary)
    assert command[-4:] == ["--device", "cuda:1", "--dtype", "float32"]


def test_a_shell_reads_back_what_was_meant():
    """A folder's name may have spaces."""
    lines = list(start(NodeAddress("a:9001"), model="./my model").lines(PLAN))
    assert shlex.split(lines[-1].splitlines()[-1])[2:4] == ["--model", "./my model"]


def test_a_fleet_on_one_machine_needs_no_mesh_token():
    """Beyond it, every machine is told to set one."""
    assert "MESHNET_MESH_TOKEN" not in "".join(start(NodeAddress("127.0.0.1:9001")).lines(PLAN))
    assert "MESHNET_MESH_TOKEN" in "".join(start(NodeAddress("desk:9001")).lines(PLAN))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (630 << 20, "630 MiB"), (5 << 30, "5 GiB")],
)
def test_sizes_are_read_as_flags_are(size: int, text: str):
    """Powers of 1,024."""
    assert size_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0001, "0.1 ms"), (0.01234, "12.3 ms"), (1.5, "1500 ms")])
def test_durations_have_three_digits(seconds: float, text: str):
    """As people write them."""
    assert duration_text(seconds) == text
