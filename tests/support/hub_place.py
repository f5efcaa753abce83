"""Points `huggingface_hub` at a hub of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants


def use_hub(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send requests there and keep what comes in `cache`: the library has read its environment already."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
