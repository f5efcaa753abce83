"""Settings of a node for tests, which change what matters to them with `dataclasses.replace`."""

from __future__ import annotations

from shard.settings import Address, KvLimits, NodeSettings
from shared.layers import LayerRange
from shared.mesh_access import MeshAccess

JOINING = NodeSettings(
    model=None,
    layers=None,
    joins=("ws://a/mesh",),
    listen=None,
    node_id=None,
    device="cpu",
    dtype="auto",
    quantize="none",
    threads=1,
    access=MeshAccess(),
    insecure=False,
    kv=KvLimits(),
    drain_s=1.0,
)
"""A node that takes any range."""

LISTENING = NodeSettings(
    model="m",
    layers=LayerRange(0, 2),
    listen=Address("127.0.0.1", 0),
    node_id="n",
    device="cpu",
    dtype="float32",
    quantize="none",
    threads=1,
    access=MeshAccess(),
    insecure=False,
    kv=KvLimits(),
    drain_s=0.0,
)
"""A node whose range is given."""
