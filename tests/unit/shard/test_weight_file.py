"""Tensors are read from disk exactly, once, and with a typed error when the file is not what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shard import weight_file
from shard.weight_file import TORCH_DTYPES, WeightReader, list_tensors, locate, read_header
from shared.errors import LoadFailed
from shared.models.tensors import ITEM_BYTES, TensorEntry

TENSORS = {
    "bf16": torch.randn(7, 5).bfloat16(),
    "f32": torch.randn(3, 4),
    "i64": torch.arange(6).view(2, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one file."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of two files and an index."""
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    files = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors", "d": "three.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tmp_path


def entries_of(folder: Path) -> dict[str, TensorEntry]:
    """What the single file holds."""
    return {entry.name: entry for entry in read_header(folder, "model.safetensors")}


@pytest.mark.parametrize("buffer_bytes", [16, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_tensors_are_read_and_converted(
    folder: Path, dtype: torch.dtype | None, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Floats in the type asked for, everything else as it is, in pieces of any size."""
    monkeypatch.setattr(weight_file, "BUFFER_BYTES", buffer_bytes)
    with WeightReader(folder, entries_of(folder).values()) as reader:
        for name, entry in entries_of(folder).items():
            expected = TENSORS[name].to(dtype) if dtype and TENSORS[name].is_floating_point() else TENSORS[name]
            read = reader.read(entry, dtype)
            assert read.dtype is expected.dtype
            assert torch.equal(read, expected)


def test_progress_reaches_the_total_and_never_falls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes read of bytes in all."""
    monkeypatch.setattr(weight_file, "BUFFER_BYTES", 16)
    seen: list[tuple[int, int]] = []
    entries = entries_of(folder)
    with WeightReader(folder, entries.values(), lambda done, total: seen.append((done, total))) as reader:
        for entry in entries.values():
            reader.read(entry, torch.float32)
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_a_large_tensor_gets_its_own_aligned_memory(tmp_path: Path) -> None:
    """Weights start at a page, whatever the file's alignment, and can be written to."""
    large = torch.arange(weight_file.HUGE_PAGE_BYTES // 4 + 1).float()
    save_file({"x": torch.ones(1, dtype=torch.uint8), "large": large}, tmp_path / "model.safetensors")
    entry = entries_of(tmp_path)["large"]
    with WeightReader(tmp_path, [entry]) as reader:
        read = reader.read(entry, None)
    assert torch.equal(read, large)
    assert read.data_ptr() % 4096 == 0
    read += 1


def test_a_file_that_shrinks_after_its_header_was_read_is_corrupt(folder: Path) -> None:
    """Truncation under a loading node is an error, not a bus fault."""
    entry = entries_of(folder)["f32"]
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: entry.offset + 8])
    with WeightReader(folder, [entry]) as reader:
        with pytest.raises(LoadFailed, match="'f32'") as caught:
            reader.read(entry, None)
        assert reader.failure is caught.value
    assert caught.value.code == "weights_corrupt"


def test_a_truncated_file_is_noticed_from_its_header(folder: Path) -> None:
    """Before anything is allocated."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(LoadFailed, match="truncated"):
        read_header(folder, "model.safetensors")


def test_a_vanished_file_is_missing(folder: Path) -> None:
    """Between header and tensor."""
    entry = entries_of(folder)["f32"]
    (folder / "model.safetensors").unlink()
    with WeightReader(folder, [entry]) as reader, pytest.raises(LoadFailed, match="weights_missing"):
        reader.read(entry, None)


def test_only_the_files_that_hold_wanted_tensors_are_opened(sharded: Path) -> None:
    """The index names a third file that does not exist; nobody wants anything of it."""
    files = list_tensors(sharded)
    assert [entry.file for entry in locate(sharded, ["b"], files)] == ["two.safetensors"]


@pytest.mark.parametrize(("name", "words"), [("c", "no tensor 'c'"), ("d", "three.safetensors")])
def test_an_index_that_promises_too_much_is_caught(sharded: Path, name: str, words: str) -> None:
    """A missing tensor and a missing file are each named."""
    with pytest.raises(LoadFailed, match=words) as caught:
        locate(sharded, [name], list_tensors(sharded))
    assert caught.value.code == "weights_missing"


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    """And advises, where there is a pickle."""
    with pytest.raises(LoadFailed, match=r"no model\.safetensors"):
        list_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(LoadFailed, match=r"write it as safetensors with .*save_pretrained"):
        list_tensors(tmp_path)


def test_every_element_type_has_its_torch_type() -> None:
    """Names and widths of the two tables agree."""
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ITEM_BYTES
