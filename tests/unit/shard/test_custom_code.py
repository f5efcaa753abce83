"""A model that brings its own code: refused unless asked for, then served like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shard import custom_code
from shard.custom_code import find_code, read_auto_map
from shard.loader import load_stage, plan_range
from shard.stage import StageInput
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.models.folder import ModelFolder
from tests.support.custom_model import CODE, CODE_FILES, save_custom_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where transformers copies the code that it runs; one for all, since Python remembers it."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(autouse=True)
def code_ran(tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There once the model's code has run from a folder."""
    mark = tmp_path / "code-ran"
    monkeypatch.setenv("MESHNET_TEST_CODE_RAN", str(mark))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    return mark


def folder_of(path: Path, absent: Any = None) -> ModelFolder:
    """A model's folder."""
    return ModelFolder(path, "odd", "f", absent)


def test_without_being_asked_for_it_is_refused_and_not_run(tmp_path: Path, code_ran: Path) -> None:
    """From config.json alone: there is not even a weight to read. The sentence says how to allow it."""
    save_custom_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(LoadFailed, match=r"configuration_odd.py, modeling_odd.py.*--trust-remote-code") as caught:
        load_stage(tmp_path / "model", LayerRange(0, 2), device="cpu")
    assert caught.value.code == "code_not_trusted"
    assert not code_ran.exists()


def test_asked_for_it_is_the_model_of_the_code(tmp_path: Path, code_ran: Path) -> None:
    """Cut in two, prefilled and continued: the logits of the whole model in one process."""
    whole = save_custom_model(tmp_path / "model")
    folder = folder_of(tmp_path / "model")
    ranges = (LayerRange(0, 2), LayerRange(2, 4))
    stages = [load_stage(folder.path, each, device="cpu", code_dir=find_code(folder)) for each in ranges]
    assert code_ran.exists()
    caches = [stage.new_cache() for stage in stages]
    token_ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    for start, end in ((0, 4), (4, 5), (5, 6)):
        hidden = stages[0].run(StageInput(token_ids=token_ids[:, start:end], cache=caches[0], past_len=start))
        logits = stages[1].run(StageInput(hidden_states=hidden, cache=caches[1], past_len=start))
        with torch.no_grad():
            expected = whole(token_ids[:, :end]).logits[0, -1]
        assert torch.allclose(logits, expected, atol=1e-4)


def test_what_transformers_knows_needs_no_code(tmp_path: Path, code_ran: Path) -> None:
    """Many checkpoints name code from before transformers had their model: its own is used, and nothing is run."""
    save_custom_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert plan_range(tmp_path, LayerRange(0, 2)).model_class.__name__ == "LlamaForCausalLM"
    assert not code_ran.exists()


def test_code_that_fails_says_why(tmp_path: Path) -> None:
    """Its own words, in one sentence."""
    save_custom_model(tmp_path)
    (tmp_path / "modeling_odd.py").write_text("raise RuntimeError('wrong day')")
    with pytest.raises(LoadFailed, match="the model's own code failed: RuntimeError: wrong day") as caught:
        plan_range(tmp_path, LayerRange(0, 2), tmp_path)
    assert caught.value.code == "model_unsupported"


def test_code_of_another_repository_is_not_fetched(tmp_path: Path) -> None:
    """Whoever trusts a model does not trust what it points to."""
    save_custom_model(tmp_path, auto_map={"AutoModelForCausalLM": "other/repo--modeling_odd.OddForCausalLM"})
    with pytest.raises(LoadFailed, match="code of another repository") as caught:
        find_code(folder_of(tmp_path))
    assert caught.value.code == "code_unavailable"


def test_code_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A folder of this machine has no other place to look."""
    save_custom_model(tmp_path)
    (tmp_path / "modeling_odd.py").unlink()
    with pytest.raises(LoadFailed, match=r"has no modeling_odd\.py"):
        find_code(folder_of(tmp_path))


@pytest.mark.parametrize("is_whole", [True, False], ids=["snapshot", "parts"])
def test_a_models_code_is_of_the_commit_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Fetched from its own repository, without weights, where the folder has only those."""
    path = tmp_path / "models--owner--odd--model" / "snapshots" / COMMIT if is_whole else tmp_path / "parts"
    save_custom_model(path)
    for name in CODE_FILES:
        (path / name).unlink()
    asked: list[tuple[str, str, list[str]]] = []

    def fetch(repo: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(shutil.copytree(CODE, tmp_path / "code"))

    monkeypatch.setattr(custom_code, "snapshot_download", fetch)
    absent = None if is_whole else SimpleNamespace(reference=f"owner/odd--model@{COMMIT}")
    code_dir = find_code(folder_of(path, absent))
    assert asked == [("owner/odd--model", COMMIT, ["*.py"])]
    assert plan_range(path, LayerRange(0, 2), code_dir).model_class.__name__ == "OddForCausalLM"


def test_a_hub_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    """`HF_HUB_OFFLINE` is set in tests."""
    save_custom_model(tmp_path)
    (tmp_path / "modeling_odd.py").unlink()
    absent = cast(Any, SimpleNamespace(reference=f"owner/odd@{COMMIT}"))
    with pytest.raises(LoadFailed, match=f"code of owner/odd@{COMMIT} cannot be fetched"):
        find_code(folder_of(tmp_path, absent))


def test_an_ordinary_model_names_no_code(tmp_path: Path) -> None:
    """Nor does one whose code is for something else than a causal language model."""
    save_custom_model(tmp_path, auto_map={"AutoModel": "modeling_odd.OddModel"})
    assert read_auto_map(tmp_path) == {}
    assert find_code(folder_of(tmp_path)) == tmp_path
