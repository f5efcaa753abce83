"""`meshnet pull` as a process: the environment's hub, an interruption that resumes, and a way out without network."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.conftest import TinyModels
from tests.support.fake_hub import COMMIT, FakeHub, running_hub
from tests.support.fleet import REPO, child_env, wait_until

WEIGHTS = f"/org/tiny/resolve/{COMMIT}/model.safetensors"
EXTRA = f"/org/tiny/resolve/{COMMIT}/extra.safetensors"
TIMEOUT_S = 60


@pytest.fixture
def hub(tiny_model: TinyModels) -> Iterator[FakeHub]:
    """A repository with two files of weights."""
    files = {path.name: path.read_bytes() for path in tiny_model("llama").iterdir()}
    files["extra.safetensors"] = save({"padding": np.zeros(1_000_000, dtype=np.uint8)})
    with running_hub(FakeHub(files={"org/tiny": files})) as running:
        yield running


def start_pull(url: str, folder: Path) -> subprocess.Popen[str]:
    """Pull the repository into a cache of its own."""
    env = child_env(HF_ENDPOINT=url, HF_HOME=str(folder), HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1")
    command = [sys.executable, "-m", "shared.cli", "pull", "org/tiny"]
    return subprocess.Popen(command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_killed_pull_goes_on_with_the_files_it_lacks(hub: FakeHub, tmp_path: Path):
    """SIGKILL in the middle of the second file; the first one is not fetched again."""
    hub.stall_after[EXTRA] = 1000
    first = start_pull(hub.url, tmp_path)
    assert hub.stalled.wait(TIMEOUT_S)
    wait_until(lambda: any(tmp_path.glob("**/snapshots/*/model.safetensors")), "the first file", TIMEOUT_S)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=TIMEOUT_S)
    hub.stall_after.clear()
    second = start_pull(hub.url, tmp_path)
    output, errors = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 0, errors
    assert (Path(output.strip()) / "extra.safetensors").read_bytes() == hub.files["org/tiny"]["extra.safetensors"]
    assert (hub.downloads(WEIGHTS), hub.downloads(EXTRA)) == (1, 2)


def test_a_pull_prints_the_folder_and_reports_on_standard_error(hub: FakeHub, tmp_path: Path):
    """So that a script can use it."""
    pull = start_pull(hub.url, tmp_path)
    output, errors = pull.communicate(timeout=TIMEOUT_S)
    assert pull.returncode == 0, errors
    assert len(output.splitlines()) == 1
    assert (Path(output.strip()) / "config.json").exists()
    assert "Downloading org/tiny" in errors
    assert "org/tiny: 6 layers, fingerprint " in errors


def test_without_network_a_pull_ends_with_one_sentence(tmp_path: Path):
    """Nobody listens on port 9 of this machine's last loopback address."""
    pull = start_pull("http://127.255.255.254:9", tmp_path)
    output, errors = pull.communicate(timeout=TIMEOUT_S)
    assert pull.returncode == 1
    assert output == ""
    assert "Error: org/tiny is not in the cache, and http://127.255.255.254:9 cannot be reached" in errors
    assert "Traceback" not in errors
