"""What a model folder says, and which folders are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.models.errors import ModelUnavailable
from shared.models.folder import check_folder, read_config, weight_files
from tests.conftest import TinyModels


def write_config(folder: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> Path:
    """A folder with these JSON files."""
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_real_folder_gives_its_figures(tiny_model: TinyModels):
    """Layers, sizes, context, dtype and end ids come from the JSON that transformers writes."""
    config = read_config(tiny_model("qwen2"))
    assert (config.model_type, config.num_layers, config.hidden_size) == ("qwen2", 6, 32)
    assert (config.context_len, config.dtype, config.eos_ids) == (2048, "f32", frozenset({2}))


def test_end_ids_are_the_union_of_config_and_generation_config(tmp_path: Path):
    """One id or a list, in either file."""
    folder = write_config(tmp_path, {"num_hidden_layers": 2, "eos_token_id": 7}, {"eos_token_id": [7, 9]})
    assert read_config(folder).eos_ids == {7, 9}


def test_a_nested_text_config_wins(tmp_path: Path):
    """Models with vision keep the decoder's figures under `text_config`, and some end ids beside it."""
    text = {"num_hidden_layers": 3, "max_position_embeddings": 99, "dtype": "bfloat16", "model_type": "x_text"}
    config = read_config(write_config(tmp_path, {"text_config": text, "eos_token_id": 1, "model_type": "x"}))
    assert (config.num_layers, config.context_len, config.dtype) == (3, 99, "bf16")
    assert (config.model_type, config.eos_ids) == ("x_text", {1})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_hidden_layers": 0}', "{"])
def test_a_config_without_layers_is_refused(tmp_path: Path, content: str):
    """Not JSON, no object, or no number of layers."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelUnavailable) as caught:
        read_config(tmp_path)
    assert caught.value.code == "not_a_model"
    assert "config.json" in caught.value.message


def test_what_is_missing_is_named(tmp_path: Path):
    """An empty folder lacks everything; pickled weights do not count as weights."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelUnavailable) as caught:
        check_folder(tmp_path)
    for word in ("config.json", "tokenizer.json", "*.safetensors", "save_pretrained"):
        assert word in caught.value.message


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path):
    """A half-copied folder is not served."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    assert [path.name for path in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    with pytest.raises(ModelUnavailable, match=r"model-2\.safetensors missing"):
        check_folder(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path):
    """A path is refused, and not taken for a name in the folder."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(ModelUnavailable, match="no file beside it"):
        weight_files(tmp_path)
