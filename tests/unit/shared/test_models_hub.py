"""Hub repositories and files, against a hub of our own that cuts, stalls and refuses."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from shared.models import hub as hub_module
from shared.models.errors import ModelUnavailable
from shared.models.hub import fetch_file, fetch_snapshot
from shared.models.progress import Progress, ignore_progress
from shared.models.source import resolve_model
from tests.conftest import TinyModels
from tests.support.fake_hub import FakeHub, running_hub
from tests.support.hub_place import use_hub
from tests.support.model_files import HUB_FILE


@pytest.fixture
def hub(tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a tiny repository, and what a repository holds besides."""
    folder = tiny_model("llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    extras = {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"code", "onnx/model.onnx": b"", "README.md": b"#"}
    repositories = {"org/tiny": {**files, **extras}, "org/tiny-GGUF": {"tiny-q8.gguf": os.urandom(400_000)}}
    with running_hub(FakeHub(files=repositories)) as running:
        use_hub(running.url, tmp_path / "hf", monkeypatch)
        yield running


def test_a_repository_becomes_a_model(hub: FakeHub, tiny_model: TinyModels):
    """Named by its id, with the same fingerprint as the folder it was made from."""
    model = resolve_model("org/tiny")
    assert model.name == "org/tiny"
    assert model.fingerprint == resolve_model(str(tiny_model("llama"))).fingerprint


def test_only_safetensors_tokenizer_and_config_are_fetched(hub: FakeHub):
    """No pickles, no code, no other frameworks' weights."""
    folder = fetch_snapshot("org/tiny", ignore_progress)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"pytorch_model.bin", "modeling_evil.py", "onnx", "README.md"}


def test_a_second_time_the_hub_is_not_asked(hub: FakeHub):
    """Starting again costs no round trip, and works without network."""
    fetch_snapshot("org/tiny", ignore_progress)
    hub.requests.clear()
    fetch_snapshot("org/tiny", ignore_progress)
    assert hub.requests == []
    fetch_snapshot("org/tiny", ignore_progress, refresh=True)
    assert hub.requests


def test_bytes_are_reported(hub: FakeHub):
    """A bar needs to know how much of how much."""
    seen: list[Progress] = []
    fetch_snapshot("org/tiny", seen.append)
    assert any(progress.unit == "bytes" for progress in seen)
    assert seen[-1].is_finished


def test_a_catalogue_file_is_fetched_with_the_users_token(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Some repositories open only to those who have accepted a licence."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    content = hub.files["org/tiny-GGUF"]["tiny-q8.gguf"]
    fetch_file(HUB_FILE, tmp_path / "file", len(content), ignore_progress)
    assert (tmp_path / "file").read_bytes() == content
    assert hub.headers[-1]["authorization"] == "Bearer hf_secret"


def test_a_missing_repository_is_one_sentence(hub: FakeHub):
    """Not a stack of advice about tokens."""
    with pytest.raises(ModelUnavailable) as caught:
        fetch_snapshot("org/nothing", ignore_progress)
    assert caught.value.code == "unknown_model"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["org/a--b", "org/a..b", "org/name.git", "org/" + "x" * 100])
def test_a_name_that_no_repository_can_have_is_one_sentence(hub: FakeHub, name: str):
    """The library's own check ends in a traceback; the hub is not asked."""
    with pytest.raises(ModelUnavailable, match="no folder here and no hub") as caught:
        resolve_model(name)
    assert caught.value.code == "unknown_model"
    assert hub.requests == []


def test_without_network_the_answer_comes_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One attempt at a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        use_hub(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path / "hf", monkeypatch)
        started = time.monotonic()
        with pytest.raises(ModelUnavailable, match="cannot be reached") as caught:
            fetch_snapshot("org/tiny", ignore_progress)
    assert caught.value.code == "no_network"
    assert time.monotonic() - started < 5


def test_a_hub_that_accepts_and_says_nothing_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A captive network, a silent proxy."""
    monkeypatch.setattr(hub_module, "ANSWER_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        use_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "hf", monkeypatch)
        with pytest.raises(ModelUnavailable, match="cannot be reached"):
            fetch_snapshot("org/tiny", ignore_progress)


def test_offline_mode_is_respected(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    """HF_HUB_OFFLINE means what it says."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE"):
        fetch_snapshot("org/tiny", ignore_progress)
    assert hub.requests == []
