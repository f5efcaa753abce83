"""What the documents point to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    """A renamed module or decision breaks this test, not a reader's visit."""
    targets = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []
