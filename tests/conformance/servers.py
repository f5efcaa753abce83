"""The two servers that clients are tried against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.default_model import default_model_folder
from tests.support.fleet import running_fleet
from tests.support.scripted_mesh import read_script, running_scripted_mesh

CUTS = ("0:12", "12:24")
BFLOAT16 = ("--dtype", "bfloat16", "--device", "cpu", "--threads", "1")
Served = tuple[str, str]
"""A base_url and a model's name."""


@contextlib.contextmanager
def serving_script(script: Path) -> Iterator[Served]:
    """A scripted mesh."""
    name = read_script(script).model.name
    with running_scripted_mesh(script) as mesh:
        yield mesh.base_url, name


@contextlib.contextmanager
def serving_real_model(logs: Path) -> Iterator[Served]:
    """The default model on two nodes, fetched if need be."""
    folder = default_model_folder()
    with running_fleet(folder, CUTS, logs, common_node_args=BFLOAT16) as fleet:
        name = fleet.get("/v1/models").json()["data"][0]["id"]
        yield f"{fleet.base_url}/v1", name
