"""Fixtures that every kind of test may use."""

from __future__ import annotations

import contextlib
import gc
import os
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

ASKED_FOR = {
    "real_model": ("MESHNET_REAL_MODEL_TESTS", "needs the default chat model"),
    "slow": ("MESHNET_SLOW_TESTS", "starts a fleet of processes and waits for it"),
}
"""Tests that run only when their variable is 1, and why."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, visibly, what is to be asked for and was not."""
    for marker, (variable, reason) in ASKED_FOR.items():
        if os.environ.get(variable) == "1":
            continue
        skip = pytest.mark.skip(reason=f"{reason}: set {variable}=1")
        for item in items:
            if marker in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Spare every collection to come what is here to stay: libraries, modules, thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two cores are shared by everything that a test starts."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def _authorities_are_read_once() -> Iterator[None]:
    """Otherwise each httpx client reads the list of the world's certificate authorities, 40 ms long."""
    import certifi

    create, of_the_world = ssl.create_default_context, certifi.where()
    shared = cache(lambda: create(cafile=of_the_world))

    def create_default_context(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        return shared() if not args and kwargs == {"cafile": of_the_world} else create(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_default_context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nodes_are_forked() -> Iterator[None]:
    """Otherwise each of a hundred nodes imports torch and transformers, six seconds long."""
    from tests.support import fleet
    from tests.support.forked_nodes import ForkedNodes

    with contextlib.closing(ForkedNodes(fleet.child_env())) as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "forked_nodes", nodes)
        yield


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
def kernels_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is kept which kernels are fast here: measuring takes a second, and is done once per test run."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """`tiny_model("qwen2")` is the folder of a tiny model of that kind."""
    return TinyModels(tmp_path_factory.mktemp("models"))
