"""Where a range's weights come from: this machine's disk by fingerprint, or wherever a name leads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shard.assignment import Assignment, Loading, LoadStopped, ServedModel
from shard.find_weights import find_weights, local_models
from shard.load import measure_room
from shard.room import Room
from shared.layers import LayerRange
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import fingerprint
from shared.models.folder import ModelFolder
from shared.models.progress import Progress, ProgressSink
from tests.conftest import TinyModels
from tests.support.node_settings import JOINING


class Reports:
    """What a load has reported, and whether it is wanted."""

    def __init__(self) -> None:
        self.bytes: list[tuple[int, int]] = []
        self.is_unwanted = False
        self.loading = Loading(
            progress=lambda done, total: self.bytes.append((done, total)),
            cancelled=lambda: self.is_unwanted,
            make_room=lambda _bytes, _measure: None,
        )


def assignment(model: str, name: str = "") -> Assignment:
    """Two layers of six of a model."""
    return Assignment(ServedModel(model, name, 6), LayerRange(0, 2))


def find(wanted: Assignment, cache: Path, hint: str | None = None, reports: Reports | None = None) -> Path:
    """The folder."""
    settings = replace(JOINING, model=hint)
    return find_weights(wanted, (reports or Reports()).loading, settings=settings, cache=cache).path


def test_model_in_the_cache_is_found_by_its_fingerprint(tiny_model: TinyModels, tmp_path: Path) -> None:
    """Whatever it is called there or at the gateway; what is no model is passed over."""
    folder = tiny_model("qwen2")
    copy = shutil.copytree(folder, tmp_path / "models" / "any-name")
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{}")
    assert local_models(None, tmp_path) == {fingerprint(folder): copy}
    assert find(assignment(fingerprint(folder), "/path/on/the/gateway"), tmp_path) == copy


def test_hint_may_be_a_folder_anywhere(tiny_model: TinyModels, tmp_path: Path) -> None:
    """`--model` says what this machine has."""
    folder = tiny_model("qwen2")
    assert find(assignment(fingerprint(folder)), tmp_path, hint=str(folder)) == folder


def test_what_a_name_leads_to_must_be_the_model(tiny_model: TinyModels, tmp_path: Path) -> None:
    """A folder of that name with another model in it is passed over, and said."""
    folder = tiny_model("llama")
    with pytest.raises(ModelUnavailable, match=f"this machine: has the model {fingerprint(folder)}"):
        find(assignment("0123", str(folder)), tmp_path)


def test_names_that_mean_nothing_are_said(tmp_path: Path) -> None:
    """The reason is that of the gateway's name, or that it gave none."""
    with pytest.raises(ModelUnavailable, match=r"0123 \(/nowhere\) cannot be had"):
        find(assignment("0123", "/nowhere"), tmp_path, hint="xyz")
    with pytest.raises(ModelUnavailable, match=r"0123 \(without a name\) cannot be had"):
        find(assignment("0123"), tmp_path)


def test_machines_own_name_is_tried_after_the_gateways(
    tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `--model` names may be this model, though the gateway calls it by a path of its own machine."""
    folder, asked = tiny_model("qwen2"), []

    def resolve(name: str, *_: object, **__: object) -> ModelFolder:
        asked.append(name)
        if name != "owner/name":
            raise ModelUnavailable("unknown_model", f"no {name}")
        return ModelFolder(folder, name, "0123")

    monkeypatch.setattr("shard.range_files.resolve_range", resolve)
    assert find(assignment("0123", "/theirs"), tmp_path, hint="owner/name") == folder
    assert asked == ["/theirs", "owner/name"]


def test_fetching_reports_bytes_and_stops_when_it_is_not_wanted(
    tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes go to the peers; steps that are no bytes only ask whether to go on."""
    folder, reports = tiny_model("qwen2"), Reports()

    def resolve(name: str, layers: LayerRange, *, progress: ProgressSink, **_: object) -> ModelFolder:
        assert layers == LayerRange(0, 2)
        progress(Progress("Downloading", 5, 10))
        progress(Progress("Converting", 1, 3, "tensors"))
        return ModelFolder(folder, name, fingerprint(folder))

    monkeypatch.setattr("shard.range_files.resolve_range", resolve)
    wanted = assignment(fingerprint(folder), "owner/name")
    assert find(wanted, tmp_path, reports=reports) == folder
    assert reports.bytes == [(5, 10)]
    reports.is_unwanted = True
    with pytest.raises(LoadStopped):
        find(wanted, tmp_path, reports=reports)


def test_room_is_measured() -> None:
    """Free memory of the machine, and what this process has."""
    import torch

    room = measure_room(torch.device("cpu"))
    assert isinstance(room, Room)
    assert room.free_bytes > 0
    assert room.used_bytes > 50_000_000
