"""What a node says of a range that it has loaded."""

from __future__ import annotations

import dataclasses

from shard.runner import Runner
from shared.layers import LayerRange
from shared.messages import NodeInfo
from tests.support.fake_node import running_fake_node
from tests.support.fake_runner import FakeRunner

SAID_BY_THE_NODE = {"layers", "num_layers", "features"}
"""The first two are what was asked for, the last is more than the runner's own."""


async def test_all_that_a_runner_knows_is_said() -> None:
    """Every field that both have: two that differ in one must not be taken for copies of each other."""
    shared = {field.name for field in dataclasses.fields(NodeInfo)} & set(dir(Runner)) - SAID_BY_THE_NODE
    assert {"quantize", "dtype", "device"} <= shared
    runner = FakeRunner(LayerRange(0, 2), 2, quantize="int8")
    async with running_fake_node(num_layers=2, runner=runner) as node:
        info = node.service.info
        assert info is not None
        assert info.quantize == "int8"
        assert {name: getattr(info, name) for name in shared} == {name: getattr(runner, name) for name in shared}
