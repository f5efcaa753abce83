"""Fixtures that every kind of test may use."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

REAL_MODEL_TESTS = os.environ.get("MESHNET_REAL_MODEL_TESTS") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, visibly, what needs the default chat model unless it was asked for."""
    if REAL_MODEL_TESTS:
        return
    skip = pytest.mark.skip(reason="needs the default chat model: set MESHNET_REAL_MODEL_TESTS=1")
    for item in items:
        if "real_model" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two cores are shared by everything that a test starts."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


class TinyModels:
    """Builds each kind of tiny model once per test run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, kind: str) -> Path:
        """The folder of the model of this kind."""
        from tests.support.tiny_models import build_tiny_model

        path = self._folder / kind
        if not (path / "model.safetensors").exists():
            build_tiny_model(kind, path)
        return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """`tiny_model("qwen2")` is the folder of a tiny model of that kind."""
    return TinyModels(tmp_path_factory.mktemp("models"))
