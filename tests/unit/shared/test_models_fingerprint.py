"""One model has one fingerprint on every machine; another model of the same shape has another."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import fingerprint, stored_tensors
from tests.conftest import TinyModels
from tests.support.default_model import default_model_folder


@pytest.fixture
def folder(tiny_model: TinyModels, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json, and the order of all."""
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))


def test_it_is_sixteen_hexadecimal_digits(folder: Path):
    """Short enough for a header, long enough for all models there are."""
    assert len(fingerprint(folder)) == 16
    int(fingerprint(folder), 16)


def test_who_wrote_the_folder_and_where_does_not_matter(folder: Path):
    """Another transformers version, another name, another key order: the same model."""
    before = fingerprint(folder)
    edit_config(folder, transformers_version="9.9.9", _name_or_path="elsewhere")
    assert fingerprint(folder) == before


def test_how_the_weights_are_cut_into_files_does_not_matter(folder: Path):
    """One file or several with an index: the same tensors."""
    before = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in halves.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    assert fingerprint(folder) == before


def test_other_weights_of_the_same_shape_differ(folder: Path):
    """A fine-tune must never serve one route with its base."""
    before = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] = tensors["model.layers.3.mlp.up_proj.weight"] * 1.01
    save_file(tensors, folder / "model.safetensors")
    assert fingerprint(folder) != before


def test_config_and_tokenizer_count(folder: Path):
    """A changed rope base or a changed vocabulary is another model."""
    seen = {fingerprint(folder)}
    edit_config(folder, rms_norm_eps=0.5)
    seen.add(fingerprint(folder))
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    seen.add(fingerprint(folder))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "garbage", [b"", b"\x08\0\0", b"\xff" * 8 + b"{}", b"\x02\0\0\0\0\0\0\0[]", b"\4\0\0\0\0\0\0\0{{{{"]
)
def test_garbage_for_weights_is_a_clear_error(folder: Path, garbage: bytes):
    """No announced header size is believed."""
    (folder / "model.safetensors").write_bytes(garbage)
    with pytest.raises(ModelUnavailable, match="safetensors"):
        fingerprint(folder)


def test_weights_that_are_cut_short_are_a_clear_error(folder: Path):
    """An interrupted copy says so."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelUnavailable, match="is truncated: tensor"):
        list(stored_tensors(folder))


@pytest.mark.real_model
def test_the_real_model_takes_less_than_a_fifth_of_a_second():
    """It is computed at each start of each process."""
    folder = default_model_folder()
    took_s = []
    for _ in range(3):
        started = time.perf_counter()
        fingerprint(folder)
        took_s.append(time.perf_counter() - started)
    assert min(took_s) < 0.2
