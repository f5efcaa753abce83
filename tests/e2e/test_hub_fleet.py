"""A mesh of processes that are given the name of a hub repository: nobody fetches more than its part."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.models.fingerprint import fingerprint
from shared.models.partial_file import read_ledger
from shared.models.spans import total_bytes
from tests.conftest import TinyModels
from tests.support import fleet
from tests.support.fake_hub import FakeHub, running_hub
from tests.support.fleet import child_env, running_fleet

WEIGHTS = "model.safetensors"


def share_kept(cache: Path, size: int) -> float:
    """How much of the weights a process has on disk."""
    (ledger,) = cache.glob(f"parts/*/{WEIGHTS}.pieces")
    return total_bytes(read_ledger(ledger.with_suffix("")).spans) / size


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mesh_of_a_hub_model_fetches_ranges(tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three machines with empty caches: each node its layers, the gateway no weights, and chat works."""
    whole = tiny_model("llama")
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    size = len(files[WEIGHTS])
    caches = {name: tmp_path / name for name in ("a", "b", "gateway")}
    with running_hub(FakeHub(files={"org/tiny": files})) as hub:
        place = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        monkeypatch.setattr(fleet, "child_env", lambda: child_env(**place))
        with running_fleet(
            Path("org/tiny"),
            ["0:3", "3:6"],
            tmp_path,
            node_args={0: ["--cache-dir", str(caches["a"])], 1: ["--cache-dir", str(caches["b"])]},
            gateway_args=["--cache-dir", str(caches["gateway"])],
        ) as mesh:
            answer = mesh.chat("hi", max_tokens=4).json()
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["system_fingerprint"] == f"fp_{fingerprint(whole)}"
    assert share_kept(caches["gateway"], size) < 0.3
    assert share_kept(caches["a"], size) < 0.75
    assert share_kept(caches["b"], size) < 0.75
