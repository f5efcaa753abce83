"""Raw prompts over a real mesh of two nodes, compared with the same model in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.fleet import Fleet, running_fleet
from tests.support.reference import Reference
from tests.support.tiny_models import build_tiny_model

pytestmark = pytest.mark.slow

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


def logits_of(reference: Reference, ids: list[int]) -> Any:
    """Log-probabilities after each token: [len(ids), vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(reference.model(torch.tensor([ids])).logits[0].float(), dim=-1)


def test_likelihoods_are_the_whole_models(fleet: Fleet, reference: Reference):
    """What lm-evaluation-harness asks for: a batch, echoed, with exactly one token generated."""
    ids = [list(reference.tokenizer(prompt).input_ids) for prompt in PROMPTS]
    body = post(fleet, "/v1/completions", prompt=ids, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for one, choice in zip(ids, body["choices"], strict=True):
        logprobs, expected = choice["logprobs"], logits_of(reference, one)
        assert len(logprobs["tokens"]) == len(one) + 1
        assert logprobs["token_logprobs"][0] is None
        following = [*one[1:], int(expected[-1].argmax())]
        wanted = [float(expected[place, token]) for place, token in enumerate(following)]
        assert logprobs["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
        best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
        assert best == pytest.approx(expected.max(dim=-1).values.tolist(), abs=1e-3)
        greedy = [token == int(row.argmax()) for token, row in zip(following, expected, strict=True)]
        found = [value == top for value, top in zip(logprobs["token_logprobs"][1:], best, strict=True)]
        assert found == greedy


def test_the_prompt_alone_can_be_scored(fleet: Fleet, reference: Reference):
    """Without generating; and the mesh goes on."""
    ids = list(reference.tokenizer(PROMPTS[0]).input_ids)
    body = post(fleet, "/v1/completions", prompt=ids, max_tokens=0, logprobs=0, echo=True)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPTS[0], "length")
    expected = logits_of(reference, ids)
    wanted = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
    assert post(fleet, "/v1/completions", prompt=ids, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_choices_of_a_prompt(fleet: Fleet):
    """As many as asked for, reproducible, and the best of them first."""
    asked = {"prompt": PROMPTS[:2], "max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2}
    first, again = (post(fleet, "/v1/completions", **asked)["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]
    best = post(fleet, "/v1/completions", **asked, best_of=4, logprobs=0)["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["token_logprobs"]) for one in best]
    assert means[0] >= means[1]
    assert means[2] >= means[3]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_whole_models_hidden_states(fleet: Fleet, reference: Reference, pooling: str):
    """After the final norm, pooled, of length 1."""
    ids = [list(reference.tokenizer(prompt).input_ids) for prompt in PROMPTS]
    data = post(fleet, "/v1/embeddings", input=PROMPTS, pooling=pooling)["data"]
    for one, item in zip(ids, data, strict=True):
        with torch.no_grad():
            hidden = reference.model.model(torch.tensor([one])).last_hidden_state[0].float()
        pooled = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
        assert item["embedding"] == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-4)
