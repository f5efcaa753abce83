"""The default chat model, cut in two and in three, against transformers `generate` in one process.

A class for each cut, so that two processes can take one each: most of the time goes into passes without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.fleet import Fleet, running_fleet
from tests.support.reference import Answer, Reference, chat_messages

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_TOKENS = 64
PROMPTS = (
    "Write a Python function that merges two sorted lists.",
    "Erzähle mir kurz, warum der Himmel blau ist. Größenordnungen bitte!",
    "用中文简单介绍一下长城,并加一个表情符号。",
)
SYSTEM = ""
"""The template's own would be half of what passes without a cache compute."""
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 1234}


@pytest.fixture(scope="module")
def model() -> Path:
    """The default model's folder, fetched and converted once."""
    from tests.support.default_model import default_model_folder

    return default_model_folder()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    """Greedy answers of the whole model in this process, which then lets go of it."""
    reference = Reference(model)
    return {prompt: reference.greedy(prompt, MAX_TOKENS, SYSTEM) for prompt in PROMPTS}


def fleet_of(model: Path, cuts: list[str], folder: Path, *node_args: str) -> Any:
    """Float32 nodes of one thread each."""
    flags = ["--dtype", "float32", "--device", "cpu", "--threads", "1", *node_args]
    return running_fleet(model, cuts, folder, common_node_args=flags)


def answer_of(fleet: Fleet, prompt: str, **parameters: Any) -> tuple[str, str, int, int]:
    """Text, finish reason, prompt tokens and completion tokens."""
    body = fleet.chat(prompt, messages=chat_messages(prompt, SYSTEM), max_tokens=MAX_TOKENS, **parameters).json()
    choice, usage = body["choices"][0], body["usage"]
    return choice["message"]["content"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def as_tuple(answer: Answer) -> tuple[str, str, int, int]:
    """An answer in the form of `answer_of`."""
    return answer.text, answer.finish_reason, answer.prompt_tokens, len(answer.token_ids)


class RealModel:
    """What must hold of every cut."""

    cuts: ClassVar[list[str]]

    @pytest.fixture(scope="class")
    @classmethod
    def cached(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
        """A fleet whose nodes keep their K/V."""
        with fleet_of(model, cls.cuts, tmp_path_factory.mktemp("cached")) as fleet:
            yield fleet

    @pytest.fixture(scope="class")
    @classmethod
    def sampled(cls, cached: Fleet) -> tuple[str, str, int, int]:
        """A seeded sample of the fleet with caches, which those without and those that forget must give too."""
        return answer_of(cached, PROMPTS[0], **SAMPLED)

    def test_the_cached_mesh_gives_the_tokens_of_one_process(self, cached: Fleet, expected: dict[str, Answer]) -> None:
        """Greedy, float32, 64 tokens, three prompts in three languages: token for token the same."""
        answers = {prompt: answer_of(cached, prompt, temperature=0) for prompt in PROMPTS}
        assert answers == {prompt: as_tuple(answer) for prompt, answer in expected.items()}

    def test_the_stateless_mesh_gives_the_same(
        self, model: Path, sampled: tuple[str, str, int, int], expected: dict[str, Answer], tmp_path: Path
    ) -> None:
        """Without a cache on any node: the same greedy tokens, and the same seeded sample as with caches."""
        with fleet_of(model, self.cuts, tmp_path, "--no-kv-cache") as stateless:
            answers = {prompt: answer_of(stateless, prompt, temperature=0) for prompt in PROMPTS}
            assert answers == {prompt: as_tuple(answer) for prompt, answer in expected.items()}
            assert answer_of(stateless, PROMPTS[0], **SAMPLED) == sampled
            assert all(not node["steps"].get("decode") for node in stateless.mesh_nodes())

    def test_a_replayed_hop_gives_the_same_sample(
        self, model: Path, sampled: tuple[str, str, int, int], tmp_path: Path
    ) -> None:
        """Sessions that expire between any two steps are re-prefilled again and again: the seeded text is the same."""
        steps = sampled[-1] - 1
        with fleet_of(model, self.cuts, tmp_path, "--kv-ttl-seconds", "0.001") as forgetful:
            assert answer_of(forgetful, PROMPTS[0], **SAMPLED) == sampled
            misses = [node["misses"].get("expired", 0) for node in forgetful.mesh_nodes()]
        assert min(misses) > steps // 2 > 4


class TestCutInTwo(RealModel):
    """Two nodes of twelve layers."""

    cuts: ClassVar[list[str]] = ["0:12", "12:24"]


class TestCutInThree(RealModel):
    """Three nodes of eight."""

    cuts: ClassVar[list[str]] = ["0:8", "8:16", "16:24"]
