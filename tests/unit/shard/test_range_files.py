"""A node loads its range from the bytes it fetched, whatever the checkpoint's layout, and from wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway.model_files import ModelFiles
from shard.held_range import Loading
from shard.load import load_runner
from shard.loader import load_stage, plan_range
from shard.range_files import resolve_range
from shard.stage import StageInput
from shared.errors import LoadFailed
from shared.layers import LayerRange
from shared.mesh_tokens import MeshTokens
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import fingerprint
from shared.models.folder import ModelFolder
from shared.models.source import resolve_outline
from shared.models.spans import Span
from shared.models.store import Store
from tests.conftest import TinyModels
from tests.support.api_server import ApiServer, running_api
from tests.support.architectures import NUM_LAYERS, VOCAB_SIZE, tiny_config
from tests.support.fake_hub import COMMIT, FakeHub, running_hub
from tests.support.hub_place import use_hub
from tests.support.node_settings import LISTENING
from tests.support.parity_case import STEPS, TOLERANCE, CutModel, build_whole, reference
from tests.support.stored_models import build_stored

THREE = (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, NUM_LAYERS))
MIDDLE = LayerRange(2, 4)
TOKEN = "mesh-secret"
URL = f"/org/tiny/resolve/{COMMIT}/model.safetensors"
SETTINGS = replace(LISTENING, model="org/tiny", layers=MIDDLE)
LAYOUTS = {
    "mixtral": "block_sparse_moe.experts.1.w1",  # experts one by one, under other names than the model's
    "qwen3_moe": "mlp.experts.1.gate_proj",  # experts one by one
    "ernie4_5_moe": "mlp.experts.1.up_proj",  # and a bias that moves to another module
    "phi3": "mlp.gate_up_proj",  # projections in one
    "gpt_oss": "mlp.experts.gate_up_proj",  # experts in one, with biases
    "qwen2": "embed_tokens",  # a head that is the embedding
}
"""By model type: a part of a name that its checkpoint has."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub."""
    with running_hub(FakeHub()) as running:
        use_hub(running.url, tmp_path / "hf", monkeypatch)
        yield running


def loading(seen: list[tuple[int, int]]) -> Loading:
    """A load that is wanted and has room; what it reports is seen."""
    return Loading(
        progress=lambda done, total: seen.append((done, total)),
        cancelled=lambda: False,
        make_room=lambda *_: None,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """A folder's content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_fetched_ranges_have_the_weights_of_the_whole(hub: FakeHub, tmp_path: Path, model_type: str):
    """Three nodes with caches of their own: the same parameters, bit for bit, and the same logits."""
    folder = tmp_path / "whole"
    config = tiny_config(model_type)
    config.tie_word_embeddings = model_type == "qwen2"
    config.save_pretrained(folder)
    build_whole(folder)
    (folder / "tokenizer.json").write_text("{}")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = dict(whole.named_parameters())
    hub.files["org/tiny"] = files_of(folder)
    expected_fingerprint = fingerprint(folder)
    stages, names = [], set[str]()
    for index, layers in enumerate(THREE):
        cache = tmp_path / str(index)
        found = resolve_range("org/tiny", layers, fingerprint=expected_fingerprint, cache_dir=cache)
        names |= {entry.name for entry in plan_range(found.path, layers).entries.values()}
        stages.append(load_stage(found.path, layers, device="cpu"))
        for name, parameter in stages[-1]._model.named_parameters():
            assert torch.equal(parameter, parameters[name if name in parameters else "model.embed_tokens.weight"]), name
    assert any(LAYOUTS[model_type] in name for name in names)
    token_ids = torch.randint(3, VOCAB_SIZE, (1, sum(STEPS)), generator=torch.Generator().manual_seed(7))
    mesh = CutModel(stages, cached=True)
    ours = [mesh.step(token_ids, new_len) for new_len in STEPS]
    theirs = reference(whole, token_ids, STEPS, cached=True)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= TOLERANCE


def test_a_quantized_range_is_fetched_with_its_scales(hub: FakeHub, tmp_path: Path):
    """Its bytes in the file come, and no more than a hundredth beside; in memory they are floats."""
    folder = build_stored("gpt_oss", tmp_path / "whole")
    hub.files["org/tiny"] = files_of(folder)
    outline = resolve_outline("org/tiny", cache_dir=tmp_path)
    assert outline.absent is not None
    stored_bytes, before = plan_range(folder, MIDDLE).weight_bytes(), hub.sent[URL]
    missing = outline.absent.missing_bytes(spans_of(outline, MIDDLE))
    seen: list[tuple[int, int]] = []
    runner = load_runner(SETTINGS, outline, MIDDLE, loading(seen), cache_dir=tmp_path)
    assert 0 < missing <= hub.sent[URL] - before <= 1.01 * stored_bytes
    assert seen[-1] == (stored_bytes, stored_bytes)
    assert runner.layers == MIDDLE
    assert plan_range(folder, MIDDLE).weight_bytes(torch.bfloat16) > 1.5 * stored_bytes


def test_a_node_fetches_its_range_when_it_loads(hub: FakeHub, tiny_model: TinyModels, tmp_path: Path):
    """`python -m shard --model owner/name --layers 2:4`: less than the file comes, and is reported."""
    hub.files["org/tiny"] = files_of(tiny_model("llama"))
    outline = resolve_outline("org/tiny", cache_dir=tmp_path)
    assert outline.absent is not None
    seen: list[tuple[int, int]] = []
    missing_before = outline.absent.missing_bytes(spans_of(outline, MIDDLE))
    runner = load_runner(SETTINGS, outline, MIDDLE, loading(seen), cache_dir=tmp_path)
    assert runner.layers == MIDDLE
    assert missing_before > 0
    assert outline.absent.missing_bytes(spans_of(outline, MIDDLE)) == 0
    assert hub.sent[URL] < 0.75 * len(hub.files["org/tiny"]["model.safetensors"])
    assert len({total for _, total in seen}) == 2, "fetching, then reading"


def spans_of(folder: ModelFolder, layers: LayerRange) -> dict[str, Any]:
    """The bytes of a range."""
    entries = plan_range(folder.path, layers).stored
    return {"model.safetensors": [Span(entry.offset, entry.end) for entry in entries]}


def test_a_load_that_cannot_fetch_fails_as_a_load(hub: FakeHub, tiny_model: TinyModels, tmp_path: Path):
    """The node stays up and says why."""
    hub.files["org/tiny"] = files_of(tiny_model("llama"))
    outline = resolve_outline("org/tiny", cache_dir=tmp_path)
    hub.failing[URL] = [404] * 100
    with pytest.raises(LoadFailed, match="not there any more"):
        load_runner(SETTINGS, outline, MIDDLE, loading([]), cache_dir=tmp_path)


def test_holes_are_never_taken_for_weights(hub: FakeHub, tiny_model: TinyModels, tmp_path: Path):
    """A range whose bytes have not come is refused, by file."""
    hub.files["org/tiny"] = files_of(tiny_model("llama"))
    model = fingerprint(tiny_model("llama"))
    folder = resolve_range("org/tiny", MIDDLE, fingerprint=model, cache_dir=tmp_path)
    load_stage(folder.path, MIDDLE, device="cpu")
    with pytest.raises(LoadFailed, match=r"only parts of model\.safetensors are here") as caught:
        load_stage(folder.path, LayerRange(0, 2), device="cpu")
    assert caught.value.code == "weights_missing"


@pytest.mark.parametrize(
    ("layers", "code"), [(LayerRange(4, 9), "range_outside_model"), (LayerRange(6, 7), "range_outside_model")]
)
def test_a_range_outside_the_model_is_refused_before_weights_come(
    hub: FakeHub, tiny_model: TinyModels, tmp_path: Path, layers: LayerRange, code: str
):
    """The headers tell."""
    hub.files["org/tiny"] = files_of(tiny_model("llama"))
    with pytest.raises(LoadFailed) as caught:
        resolve_range("org/tiny", layers, fingerprint=fingerprint(tiny_model("llama")), cache_dir=tmp_path)
    assert caught.value.code == code
    assert hub.sent[URL] < 0.5 * len(hub.files["org/tiny"]["model.safetensors"])


@pytest.fixture(scope="module")
def gateway(tiny_model: TinyModels) -> Iterator[ApiServer]:
    """A gateway with a whole copy of a tiny model."""
    folder = tiny_model("llama")
    files = ModelFiles(ModelFolder(folder, "llama", fingerprint(folder)), MeshTokens([TOKEN]))
    with running_api(folder, model_files=files) as running:
        yield running


def from_gateway(gateway: ApiServer, cache: Path, model: str, name: str = "", **options: Any) -> ModelFolder:
    """What a node does that was told to hold a range."""
    assert gateway.state.model_files is not None
    url = f"{gateway.url}/mesh/models/{gateway.state.model_files.fingerprint}"
    options = {"files_url": url, "token": TOKEN, **options}
    return resolve_range(name, MIDDLE, fingerprint=model, cache_dir=cache, **options)


def test_a_range_comes_from_the_gateway(gateway: ApiServer, tiny_model: TinyModels, tmp_path: Path):
    """The same weights as from a copy, and nothing the second time."""
    model = fingerprint(tiny_model("llama"))
    folder = from_gateway(gateway, tmp_path, model)
    assert folder.fingerprint == model
    assert folder.path == Store(tmp_path).parts / model
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    ours = load_stage(folder.path, MIDDLE, device="cpu").run(StageInput(hidden_states=hidden))
    theirs = load_stage(tiny_model("llama"), MIDDLE, device="cpu").run(StageInput(hidden_states=hidden))
    assert torch.equal(ours, theirs)


def test_own_disk_is_first_then_the_hub_then_the_gateway(
    gateway: ApiServer, hub: FakeHub, tiny_model: TinyModels, tmp_path: Path
):
    """Each where the one before has not exactly this model."""
    whole = tiny_model("llama")
    model = fingerprint(whole)
    assert from_gateway(gateway, tmp_path, model, str(whole)).path == whole
    assert from_gateway(gateway, tmp_path, model, str(tiny_model("qwen2"))).path.name == model
    assert from_gateway(gateway, tmp_path, model, "org/nothing").path.name == model
    hub.files["org/other"] = files_of(tiny_model("qwen2"))
    assert from_gateway(gateway, tmp_path, model, "org/other").path.name == model
    hub.files["org/tiny"] = files_of(whole)
    assert from_gateway(gateway, tmp_path, model, "org/tiny").path.name == f"org--tiny@{COMMIT[:12]}"


def test_a_newer_commit_is_looked_for_where_the_known_one_is_another_model(
    hub: FakeHub, tiny_model: TinyModels, tmp_path: Path
):
    """This machine pinned the name before the others came to know the newer one."""
    hub.files["org/tiny"] = files_of(tiny_model("qwen2"))
    resolve_outline("org/tiny", cache_dir=tmp_path)
    hub.move_to("e" * 40, {"org/tiny": files_of(tiny_model("llama"))})
    model = fingerprint(tiny_model("llama"))
    assert resolve_range("org/tiny", MIDDLE, fingerprint=model, cache_dir=tmp_path).fingerprint == model


def test_what_no_source_has_is_one_error_with_every_reason(
    gateway: ApiServer, hub: FakeHub, tiny_model: TinyModels, tmp_path: Path
):
    """Who was asked, and what each said."""
    hub.files["org/tiny"] = files_of(tiny_model("qwen2"))
    other = fingerprint(tiny_model("qwen2"))
    with pytest.raises(ModelUnavailable) as caught:
        from_gateway(gateway, tmp_path, "0" * 16, "org/tiny", token="wrong")
    assert f"the hub: has the model {other}" in caught.value.message
    assert "the gateway: " in caught.value.message
    assert "answers 401: Nodes present the mesh token" in caught.value.message
    with pytest.raises(ModelUnavailable, match="there is no copy here, its name is no hub") as caught:
        resolve_range("gone", MIDDLE, fingerprint="0" * 16, cache_dir=tmp_path)
    assert caught.value.code == "unknown_model"


def test_a_gateway_that_gives_another_models_files_is_not_believed(
    gateway: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was fetched must have the fingerprint; nothing of it stays."""
    assert gateway.state.model_files is not None
    monkeypatch.setattr(gateway.state.model_files, "fingerprint", "0" * 16)
    with pytest.raises(ModelUnavailable, match="nothing of them was kept") as caught:
        from_gateway(gateway, tmp_path, "0" * 16)
    assert caught.value.code == "model_mismatch"
    assert list(Store(tmp_path).parts.iterdir()) == []


def test_a_cancelled_node_tries_no_further_source(gateway: ApiServer, tmp_path: Path):
    """It was told to hold something else."""
    model = gateway.state.model_files.fingerprint  # type: ignore[union-attr]
    with pytest.raises(ModelUnavailable) as caught:
        from_gateway(gateway, tmp_path, model, cancelled=lambda: True)
    assert caught.value.code == "cancelled"
