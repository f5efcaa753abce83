"""Raw prompts over a real mesh of two nodes, compared with the same model in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import Fleet, running_fleet
from tests.support.reference import Reference
from tests.support.tiny_models import build_tiny_model

PROMPTS = ["The mesh serves", "Ein Knoten f\u00e4llt", "def add(a, b):", "\u4f60\u597d", "a", "Wie sch\u00f6n! " * 20]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    return build_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    """The whole model."""
    return Reference(model)


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes with half of it each."""
    with running_fleet(model, ["0:3", "3:6"], tmp_path_factory.mktemp("logs")) as running:
        yield running


def post(fleet: Fleet, path: str, **body: Any) -> dict[str, Any]:
    """The answer's JSON."""
    response = httpx.post(fleet.base_url + path, json={"model": "default", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_several_prompts_are_each_continued_as_the_whole_model_does(fleet: Fleet, reference: Reference):
    """Greedily, as text and as ids, more of them than run at once."""
    ids = [list(reference.tokenizer(prompt).input_ids) for prompt in PROMPTS]
    expected = [reference.greedy_ids(one, 12, eos_ids=sorted(reference.eos_ids)) for one in ids]
    for prompt in (PROMPTS, ids):
        body = post(fleet, "/v1/completions", prompt=prompt, temperature=0, max_tokens=12, return_token_ids=True)
        assert [choice["token_ids"] for choice in body["choices"]] == expected
        assert [choice["prompt_token_ids"] for choice in body["choices"]] == ids
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
