"""The cache folder: one writer at a time, hashes, and room on the disk."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from shared.models import store as store_module
from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ignore_progress
from shared.models.store import Store, default_cache_dir, require_space, verify_sha256


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({}, "linux", Path.home() / ".cache" / "meshnet"),
        ({"XDG_CACHE_HOME": "/x"}, "linux", Path("/x/meshnet")),
        ({"XDG_CACHE_HOME": "/x"}, "darwin", Path.home() / "Library" / "Caches" / "meshnet"),
        ({"LOCALAPPDATA": "/l"}, "win32", Path("/l/meshnet/Cache")),
    ],
)
def test_each_platform_has_its_cache_folder(environ: dict[str, str], platform: str, expected: Path):
    """What can be fetched again belongs where the platform cleans up."""
    assert default_cache_dir(environ, platform) == expected


def test_a_right_hash_keeps_the_file(tmp_path: Path):
    """Verification reports progress and changes nothing."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    seen: list[Progress] = []
    verify_sha256(path, hashlib.sha256(b"content").hexdigest(), seen.append)
    assert path.exists()
    assert seen[-1].is_finished


def test_a_wrong_hash_names_both_and_removes_the_file(tmp_path: Path):
    """A bad download must not be found by the next attempt."""
    path = tmp_path / "file"
    path.write_bytes(b"other")
    with pytest.raises(ModelUnavailable) as caught:
        verify_sha256(path, "0" * 64, ignore_progress)
    assert caught.value.code == "hash_mismatch"
    assert "0" * 64 in caught.value.message
    assert hashlib.sha256(b"other").hexdigest() in caught.value.message
    assert not path.exists()


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path):
    """The sentence says what is needed, what is free, and how to choose another disk."""
    with pytest.raises(ModelUnavailable, match=r"needs 1\.0 EB, and .* free; MESHNET_CACHE_DIR"):
        require_space(tmp_path, 10**18, "the model")


def test_a_cache_folder_that_cannot_be_made_is_said(tmp_path: Path):
    """A file where the folder should be."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(ModelUnavailable, match="cannot be created"):
        _ = Store(tmp_path / "cache").models


def test_a_second_holder_waits_and_is_told(tmp_path: Path):
    """Two processes do the work once; the second says that it waits."""
    store = Store(tmp_path)
    waiting, order = threading.Event(), []
    seen: list[Progress] = []

    def watch(progress: Progress) -> None:
        seen.append(progress)
        waiting.set()

    def second() -> None:
        with store.lock("name", "do it", watch):
            order.append("second")

    thread = threading.Thread(target=second)
    with store.lock("name", "do it", lambda _: order.append("never")):
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert {progress.task for progress in seen} == {"Waiting for another process to do it"}
    assert [progress.is_finished for progress in seen] == [False, True]
    assert order == ["first", "second"]


def test_waiting_for_a_lock_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A holder that never ends does not keep others for ever."""
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.05)
    store = Store(tmp_path)
    with (
        store.lock("name", "do it", ignore_progress),
        pytest.raises(ModelUnavailable, match="another process"),
        store.lock("name", "do it", ignore_progress),
    ):
        pass
