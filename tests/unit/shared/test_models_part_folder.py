"""Only a range's bytes are fetched, once, and what is on disk is never taken for more than it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.models import part_folder, range_client
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import SAMPLE_BYTES, SAMPLED_TENSORS_MAX, fingerprint
from shared.models.folder import AbsentWeights, ModelFolder
from shared.models.hub_parts import fetch_hub_outline
from shared.models.partial_file import read_ledger
from shared.models.progress import Progress, ignore_progress
from shared.models.source import resolve_model, resolve_outline
from shared.models.spans import Span, merge, total_bytes
from shared.models.store import Store
from tests.support.fake_hub import COMMIT, FakeHub, running_hub
from tests.support.hub_place import use_hub
from tests.support.numpy_model import FILES, header_end, layer_spans, numpy_model, write_files

MODEL = numpy_model()
RANGE = layer_spans(MODEL, 1, 2)
RANGE_BYTES = total_bytes(span for spans in RANGE.values() for span in spans)
OTHER_COMMIT = "f" * 40
URLS = {name: f"/org/tiny/resolve/{COMMIT}/{name}" for name in MODEL}
WEIGHTS = URLS[FILES[0]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the model; requests are of small pieces, and attempts follow at once."""
    monkeypatch.setattr(part_folder, "PIECE_BYTES", 40_000)
    monkeypatch.setattr(part_folder, "HEADER_GUESS_BYTES", 512)
    monkeypatch.setattr(range_client, "RETRY_WAIT_S", 0.0)
    with running_hub(FakeHub(files={"org/tiny": dict(MODEL)})) as running:
        use_hub(running.url, tmp_path / "hf", monkeypatch)
        yield running


def outline(cache: Path, *, cancelled: bool = False) -> ModelFolder:
    """The model without weights."""
    return fetch_hub_outline("org/tiny", None, Store(cache), ignore_progress, cancelled=lambda: cancelled)


def absent(folder: ModelFolder) -> AbsentWeights:
    """What fetches weights."""
    assert folder.absent is not None
    return folder.absent


def fetch_range(cache: Path) -> ModelFolder:
    """The model with the weights of two layers."""
    folder = outline(cache)
    absent(folder).fetch(RANGE, ignore_progress)
    return folder


def has_range(folder: ModelFolder) -> bool:
    """Whether the range's bytes on disk are the model's."""
    return all(
        (folder.path / file).read_bytes()[span.start : span.end] == MODEL[file][span.start : span.end]
        for file, spans in RANGE.items()
        for span in spans
    )


def test_an_outline_needs_no_weights_and_tells_the_model(hub: FakeHub, tmp_path: Path):
    """Config, tokenizer, headers and samples give the same fingerprint as the whole folder."""
    folder = outline(tmp_path / "cache")
    whole = write_files(tmp_path / "whole", MODEL)
    assert folder.fingerprint == fingerprint(whole)
    assert (folder.name, folder.is_whole, absent(folder).reference) == ("org/tiny", False, f"org/tiny@{COMMIT}")
    headers = sum(header_end(MODEL[file]) for file in FILES)
    assert sum(hub.sent[URLS[file]] for file in FILES) <= headers + SAMPLED_TENSORS_MAX * SAMPLE_BYTES


def test_a_range_costs_its_own_bytes(hub: FakeHub, tmp_path: Path):
    """At most 1.02 of them, beside headers, config and tokenizer; the other file of weights is left alone."""
    folder = fetch_range(tmp_path)
    assert has_range(folder)
    beside = sum(header_end(MODEL[file]) for file in FILES)
    beside += sum(len(content) for name, content in MODEL.items() if name not in FILES)
    model_bytes = sum(count for path, count in hub.sent.items() if "/resolve/" in path)
    assert RANGE_BYTES <= model_bytes <= 1.02 * RANGE_BYTES + beside
    assert hub.sent[URLS[FILES[1]]] <= header_end(MODEL[FILES[1]]) + SAMPLED_TENSORS_MAX * SAMPLE_BYTES


def test_neighbouring_tensors_share_requests(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two layers that lie together are one request where it may be long enough; samples that are there part nothing."""
    monkeypatch.setattr(part_folder, "PIECE_BYTES", 16 * 1024 * 1024)
    folder = outline(tmp_path)
    before = hub.downloads(WEIGHTS)
    assert len(RANGE[FILES[0]]) == 6
    absent(folder).fetch(RANGE, ignore_progress)
    assert hub.downloads(WEIGHTS) - before == len(merge(RANGE[FILES[0]]))
    assert len(merge(RANGE[FILES[0]])) == 1


def test_a_second_time_nothing_is_asked(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starting again works without network, and hashes nothing."""
    fetch_range(tmp_path)
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert has_range(fetch_range(tmp_path))
    assert hub.requests == []


def test_ranges_share_what_both_need(hub: FakeHub, tmp_path: Path):
    """A second range costs only what the first has not brought."""
    folder = fetch_range(tmp_path)
    before = hub.sent[WEIGHTS]
    wanted = layer_spans(MODEL, 2, 3)
    assert absent(folder).missing_bytes(wanted) <= RANGE_BYTES / 2
    absent(folder).fetch(wanted, ignore_progress)
    assert hub.sent[WEIGHTS] - before <= 1.02 * RANGE_BYTES / 2
    assert absent(folder).missing_bytes(wanted) == 0


def test_two_nodes_at_once_fetch_everything_once(hub: FakeHub, tmp_path: Path):
    """The lock is held between threads as between processes."""
    hub.delay_s = 0.01
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: fetch_range(tmp_path), range(2)))
    assert all(has_range(folder) for folder in folders)
    beside = header_end(MODEL[FILES[0]]) + SAMPLED_TENSORS_MAX * SAMPLE_BYTES
    assert hub.sent[WEIGHTS] <= 1.02 * RANGE_BYTES + beside


def test_all_requests_are_of_the_commit_that_was_current_at_first(hub: FakeHub, tmp_path: Path):
    """`main` moves while the weights are on their way: the model stays one."""
    folder = outline(tmp_path)
    hub.move_to(OTHER_COMMIT, {"org/tiny": numpy_model(seed=1)})
    absent(folder).fetch(RANGE, ignore_progress)
    again = fetch_range(tmp_path)
    assert has_range(again)
    assert again.fingerprint == folder.fingerprint
    assert not any(OTHER_COMMIT in path for _, path, _ in hub.requests)


def test_a_refresh_asks_for_the_newer_commit(hub: FakeHub, tmp_path: Path):
    """Another fine-tune of the same shape has another fingerprint, and a folder of its own."""
    old = outline(tmp_path)
    hub.move_to(OTHER_COMMIT, {"org/tiny": numpy_model(seed=1)})
    new = fetch_hub_outline("org/tiny", None, Store(tmp_path), ignore_progress, refresh=True)
    assert new.fingerprint != old.fingerprint
    assert new.path != old.path
    pinned = fetch_hub_outline("org/tiny", COMMIT, Store(tmp_path), ignore_progress)
    assert pinned.fingerprint == old.fingerprint


def test_a_pull_with_refresh_moves_later_ranges_on(hub: FakeHub, tmp_path: Path):
    """One command brings a machine to what the hub has now."""
    outline(tmp_path)
    hub.move_to(OTHER_COMMIT, {"org/tiny": numpy_model(seed=1)})
    whole = resolve_model("org/tiny", cache_dir=tmp_path, refresh=True)
    assert outline(tmp_path).fingerprint == whole.fingerprint


def test_a_whole_copy_is_used_first(hub: FakeHub, tmp_path: Path):
    """What `meshnet pull` has fetched is not fetched again."""
    whole = resolve_model("org/tiny", cache_dir=tmp_path)
    hub.requests.clear()
    found = resolve_outline("org/tiny", cache_dir=tmp_path)
    assert found.is_whole
    assert found == whole
    assert hub.requests == []


def test_a_half_pulled_copy_is_not_taken_for_the_whole(hub: FakeHub, tmp_path: Path):
    """An interrupted pull leaves some files: the rest is fetched."""
    whole = resolve_model("org/tiny", cache_dir=tmp_path)
    (whole.path / FILES[1]).unlink()
    assert not resolve_outline("org/tiny", cache_dir=tmp_path).is_whole
    assert resolve_model("org/tiny", cache_dir=tmp_path) == whole


def test_a_failed_fetch_goes_on_with_what_it_lacks(hub: FakeHub, tmp_path: Path):
    """Pieces that came count."""
    folder = outline(tmp_path)
    hub.cut_after[WEIGHTS] = [40_000, 40_000, *[0] * 50]
    with pytest.raises(ModelUnavailable, match="a new attempt goes on from there") as caught:
        absent(folder).fetch(RANGE, ignore_progress)
    assert caught.value.code == "download_failed"
    hub.cut_after.clear()
    missing = absent(folder).missing_bytes(RANGE)
    assert 0 < missing < RANGE_BYTES
    before = hub.sent[WEIGHTS]
    assert has_range(fetch_range(tmp_path))
    assert hub.sent[WEIGHTS] - before <= 1.01 * missing


def test_a_piece_that_changed_on_disk_is_fetched_again(hub: FakeHub, tmp_path: Path):
    """After a kill nothing on disk is believed that is not what was received."""
    folder = fetch_range(tmp_path)
    file = folder.path / FILES[0]
    ledger = file.with_name(file.name + ".pieces")
    ledger.write_text(ledger.read_text().replace('{"closed": true}\n', ""))
    with file.open("r+b") as stream:
        stream.seek(RANGE[FILES[0]][2].start + 99)
        stream.write(b"damage")
    before = hub.sent[WEIGHTS]
    assert has_range(fetch_range(tmp_path))
    assert 0 < hub.sent[WEIGHTS] - before <= 40_000


def test_bytes_are_reported(hub: FakeHub, tmp_path: Path):
    """Up to the end, never falling."""
    folder, seen = outline(tmp_path), list[Progress]()
    absent(folder).fetch(RANGE, seen.append)
    downloads = [progress for progress in seen if progress.task.startswith("Downloading org/tiny@0123")]
    assert downloads[-1].is_finished
    assert [progress.done for progress in downloads] == sorted(progress.done for progress in downloads)


@pytest.mark.parametrize("file", FILES)
def test_the_error_is_that_of_the_file_that_failed(hub: FakeHub, tmp_path: Path, file: str):
    """Whichever it is, the others end with it; it is not taken for a wish to stop."""
    hub.delay_s = 0.02
    hub.failing[URLS[file]] = [403] * 20
    with pytest.raises(ModelUnavailable, match=rf"{file} answers 403") as caught:
        outline(tmp_path)
    assert caught.value.code == "download_failed"


def test_a_cancelled_fetch_says_so(hub: FakeHub, tmp_path: Path):
    """A node that is told to hold something else."""
    with pytest.raises(ModelUnavailable) as caught:
        outline(tmp_path, cancelled=True)
    assert caught.value.code == "cancelled"


def test_a_node_that_is_told_to_stop_asks_for_no_further_piece(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whoever shows the progress says so by raising; only what was under way may still come, and counts for nothing."""
    monkeypatch.setattr(part_folder, "REPORT_BYTES", 1)
    folder = outline(tmp_path)

    class Unwanted(Exception):
        pass

    def refuse(_: Progress) -> None:
        raise Unwanted

    before = hub.downloads(WEIGHTS)
    with pytest.raises(Unwanted):
        absent(folder).fetch(RANGE, refuse)
    assert hub.downloads(WEIGHTS) - before <= range_client.CONNECTIONS_MAX < RANGE_BYTES // part_folder.PIECE_BYTES
    assert has_range(fetch_range(tmp_path))


def test_a_disk_without_room_is_noticed_before(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not after an hour of downloading."""
    folder = outline(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    before = hub.sent[WEIGHTS]
    with pytest.raises(ModelUnavailable, match="this part of org/tiny@0123456789ab needs") as caught:
        absent(folder).fetch(RANGE, ignore_progress)
    assert caught.value.code == "disk_full"
    assert hub.sent[WEIGHTS] == before


def test_a_disk_that_fills_while_fetching_leaves_nothing_that_counts(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The third piece does not fit; when there is room again, what is missing is fetched."""
    folder = outline(tmp_path)
    room, lock, write = [100_000], threading.Lock(), os.pwrite

    def limited(descriptor: int, data: bytes, offset: int) -> int:
        with lock:
            room[0] -= len(data)
            if room[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", limited)
        with pytest.raises(ModelUnavailable, match="the disk is full") as caught:
            absent(folder).fetch(RANGE, ignore_progress)
    assert caught.value.code == "disk_full"
    assert total_bytes(read_ledger(folder.path / FILES[0]).spans) <= 100_000 + header_end(MODEL[FILES[0]]) + 20_000
    assert absent(folder).missing_bytes(RANGE) > 0
    assert has_range(fetch_range(tmp_path))


def test_a_file_that_is_whole_must_have_the_hubs_hash(hub: FakeHub, tmp_path: Path):
    """One bit that was flipped on the way; nothing of the file is kept, and the next attempt is right."""
    whole = {FILES[0]: [Span(0, len(MODEL[FILES[0]]))]}
    folder = outline(tmp_path)
    hub.damaged[WEIGHTS] = 1
    with pytest.raises(ModelUnavailable, match="nothing of them was kept") as caught:
        absent(folder).fetch(whole, ignore_progress)
    assert caught.value.code == "hash_mismatch"
    assert not (folder.path / FILES[0]).exists()
    absent(folder).fetch(whole, ignore_progress)
    assert (folder.path / FILES[0]).read_bytes() == MODEL[FILES[0]]


def test_a_damaged_config_is_not_kept(hub: FakeHub, tmp_path: Path):
    """Files that are not large have git's hash."""
    hub.damaged[URLS["config.json"]] = 1
    with pytest.raises(ModelUnavailable) as caught:
        outline(tmp_path)
    assert caught.value.code == "hash_mismatch"
    assert outline(tmp_path).fingerprint


def test_a_folder_of_parts_is_not_taken_for_a_model(hub: FakeHub, tmp_path: Path):
    """Its holes would be read as zeros."""
    folder = fetch_range(tmp_path)
    with pytest.raises(ModelUnavailable, match="only parts of a model; give the name"):
        resolve_model(str(folder.path), cache_dir=tmp_path)


HEADER = MODEL[FILES[0]][8 : header_end(MODEL[FILES[0]])]


def edited(**changes: object) -> bytes:
    """The first file with one tensor's description changed."""
    header = json.loads(HEADER)
    header["model.layers.0.mlp.up_proj.weight"].update(changes)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + MODEL[FILES[0]][header_end(MODEL[FILES[0]]) :]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff" * 2000, "announces a header"),
        (b"\x10" + bytes(7) + b"{" * 2000, "not JSON"),
        (MODEL[FILES[0]][:-10], "is truncated: tensor"),
        (edited(data_offsets=[10**9, 10**9 + 65536]), "is truncated: tensor 'model.layers.0.mlp.up_proj.weight'"),
        (edited(data_offsets=[0, 65536]), "the same bytes"),
        (edited(shape=[64, 255]), "its shape takes 65280"),
        (edited(dtype="F7"), "unknown type 'F7'"),
    ],
)
def test_damaged_weights_are_named_and_not_kept(hub: FakeHub, tmp_path: Path, content: bytes, words: str):
    """Whatever is wrong with the header is known before a weight is fetched; a repaired file is read anew."""
    hub.files["org/tiny"][FILES[0]] = content
    with pytest.raises(ModelUnavailable, match=words) as caught:
        outline(tmp_path)
    assert caught.value.code == "weights_corrupt"
    assert FILES[0] in caught.value.message
    assert not (Store(tmp_path).parts / f"org--tiny@{COMMIT[:12]}" / FILES[0]).exists()


def index_with(**files: str) -> bytes:
    """The index with more tensors."""
    index = json.loads(MODEL["model.safetensors.index.json"])
    index["weight_map"].update(files)
    return json.dumps(index).encode()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model.safetensors.index.json": index_with(x="gone.safetensors")}, "weights_corrupt", "gone.safetensors"),
        ({"model.safetensors.index.json": index_with(x=FILES[0])}, "weights_corrupt", "no tensor 'x'"),
        ({"model.safetensors.index.json": b"{}"}, "weights_corrupt", "weight_map"),
        ({"config.json": None}, "not_a_model", "has no config.json"),
        ({"tokenizer.json": None}, "not_a_model", "has no tokenizer.json"),
        ({"model.safetensors.index.json": None}, "not_a_model", "has no model.safetensors"),
        ({"model.safetensors.index.json": None, "pytorch_model.bin": b"x"}, "not_a_model", "save_pretrained"),
    ],
)
def test_a_repository_that_is_no_model_is_refused(
    hub: FakeHub, tmp_path: Path, changes: dict[str, bytes | None], code: str, words: str
):
    """Naming what is wrong, from a few requests."""
    for name, content in changes.items():
        if content is None:
            del hub.files["org/tiny"][name]
        else:
            hub.files["org/tiny"][name] = content
    with pytest.raises(ModelUnavailable, match=words) as caught:
        outline(tmp_path)
    assert caught.value.code == code
