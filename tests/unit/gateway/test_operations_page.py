"""docs/operations.md explains every figure of ``GET /mesh``, and no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.memory_mesh import scripted_mesh

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"


def explained(heading: str) -> set[str]:
    """The keys in the table under a heading."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


async def snapshot() -> Mapping[str, Any]:
    """The figures of a mesh that has worked."""
    async with scripted_mesh() as mesh:
        await mesh.drive(mesh.generate(3))
        return mesh.view.snapshot()


async def test_every_figure_is_explained() -> None:
    """Keys of the document, of a node, of its link and of the gateway are those of the page."""
    whole = await snapshot()
    node = whole["nodes"][0]
    assert explained("The whole") == set(whole)
    assert explained("A node") == set(node)
    assert explained("A link") == set(node["link"])
    assert explained("The gateway") == set(whole["gateway"])
