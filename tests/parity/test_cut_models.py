"""A model cut anywhere computes what the whole model computes, position by position."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from shard.loader import load_stage
from shard.sampling import sample
from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shared.layers import LayerRange
from shared.messages import SamplingParams
from tests.conftest import TinyModels
from tests.support.tiny_models import KINDS, NUM_LAYERS, SLIDING_WINDOW

TOLERANCE = 1e-4
"""Against the whole model taking the same steps."""
ROUNDING = 5e-4
"""Against the whole model in one go, which linear attention computes by another formula."""
GREEDY = SamplingParams(temperature=0.0)
PREFILL_LEN = SLIDING_WINDOW - 2
DECODE_STEPS = 12
LONG_LEN = 300

CUTS = [
    ((0, NUM_LAYERS),),
    *(((0, cut), (cut, NUM_LAYERS)) for cut in range(1, NUM_LAYERS)),
    ((0, 2), (2, 4), (4, NUM_LAYERS)),
    tuple((i, i + 1) for i in range(NUM_LAYERS)),
]


class Whole:
    """The reference: the whole model in one process, through transformers' own cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Mapped from the file, weights lie at odd addresses, where the CPU's kernels add up in another order;
        # these tiny models amplify a last bit to 2e-4.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()
        generator = torch.Generator().manual_seed(7)
        self.token_ids = torch.randint(3, 300, (1, LONG_LEN), generator=generator)
        self._cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def at_once(self, length: int) -> torch.Tensor:
        """Logits after `length` positions that enter together."""
        with torch.no_grad():
            return self.model(self.token_ids[:, :length]).logits[0, -1]

    def in_steps(self, steps: Sequence[int]) -> list[torch.Tensor]:
        """Logits after each of the steps, which bring so many positions each."""
        cache = DynamicCache(config=self.model.config)
        return [
            self._step(start, new_len, cache)
            for start, new_len in zip(accumulate(steps, initial=0), steps, strict=False)
        ]

    def _step(self, start: int, new_len: int, cache: DynamicCache) -> torch.Tensor:
        with torch.no_grad():
            token_ids = self.token_ids[:, start : start + new_len]
            return self.model(token_ids, **{self._cache_name: cache}, use_cache=True).logits[0, -1]


class Mesh:
    """Stages in a row, as a route would visit them."""

    def __init__(self, folder: Path, cut: Sequence[tuple[int, int]]) -> None:
        self.stages: list[Stage] = [load_stage(folder, LayerRange(*bounds), device="cpu") for bounds in cut]
        self.caches: list[StageCache] = [stage.new_cache() for stage in self.stages]

    def step(self, token_ids: torch.Tensor, *, cached: bool = True) -> torch.Tensor:
        """One pass over all stages; the logits after the last position."""
        passed_on: torch.Tensor | None = None
        for stage, cache in zip(self.stages, self.caches, strict=True):
            item = StageInput(
                token_ids=token_ids if stage.is_first else None,
                hidden_states=passed_on,
                cache=cache if cached else None,
                past_len=cache.length if cached else 0,
            )
            (passed_on,) = stage.forward([item])
        assert passed_on is not None
        return passed_on

    def in_steps(self, token_ids: torch.Tensor, steps: Sequence[int]) -> list[torch.Tensor]:
        """Logits after each of the steps."""
        starts = accumulate(steps, initial=0)
        return [self.step(token_ids[:, start : start + new_len]) for start, new_len in zip(starts, steps, strict=False)]


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tiny_model: TinyModels) -> Whole:
    """One model of each kind."""
    return Whole(tiny_model(request.param))


def difference(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference between logits, step by step."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "-".join(str(end) for _, end in cut))
def test_cached_steps_equal_the_whole_model(whole: Whole, cut: tuple[tuple[int, int], ...]) -> None:
    """Prefill, then decode steps across the sliding window's edge, at every cut."""
    mesh = Mesh(whole.folder, cut)
    steps = (PREFILL_LEN, *(1,) * DECODE_STEPS)
    assert difference(mesh.in_steps(whole.token_ids, steps), whole.in_steps(steps)) <= TOLERANCE
    assert all(cache.length == sum(steps) for cache in mesh.caches)


@pytest.mark.parametrize("steps", [(5, 3, 1, 7, 2, 64, 65, 1, 1), (256, 44), (1,) * 20], ids=str)
def test_prefill_in_chunks_equals_one_prefill(whole: Whole, steps: tuple[int, ...]) -> None:
    """A prompt may enter in pieces of any length, also longer and shorter than the window."""
    mesh = Mesh(whole.folder, ((0, 2), (2, NUM_LAYERS)))
    ours = mesh.in_steps(whole.token_ids, steps)
    assert difference(ours, whole.in_steps(steps)) <= TOLERANCE
    assert difference(ours, [whole.at_once(length) for length in accumulate(steps)]) <= ROUNDING


def test_stateless_steps_equal_the_whole_model(whole: Whole) -> None:
    """Without a cache every step sends all positions, and gives the same."""
    mesh = Mesh(whole.folder, ((0, 3), (3, NUM_LAYERS)))
    for length in (1, SLIDING_WINDOW, 40):
        logits = mesh.step(whole.token_ids[:, :length], cached=False)
        assert difference([logits], [whole.at_once(length)]) <= TOLERANCE
    assert all(cache.length == 0 for cache in mesh.caches)


def test_greedy_tokens_equal_generate(whole: Whole) -> None:
    """Token for token what transformers' own `generate` says."""
    prompt = whole.token_ids[:, :20]
    expected = whole.model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None)
    mesh = Mesh(whole.folder, ((0, 2), (2, 5), (5, NUM_LAYERS)))
    logits = mesh.step(prompt)
    tokens = []
    for position in range(20, 44):
        tokens.append(sample(logits, GREEDY, position))
        logits = mesh.step(torch.tensor([tokens[-1:]]))
    assert tokens == expected[0, 20:].tolist()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cuda_stage_continues_a_cpu_stage(whole: Whole, dtype: str) -> None:
    """The first range on the CPU, the second on the GPU: the hidden states change device and type on the way."""
    first = load_stage(whole.folder, LayerRange(0, 2), device="cpu", dtype="float32")
    second = load_stage(whole.folder, LayerRange(2, NUM_LAYERS), device="cuda", dtype=dtype)
    caches = (first.new_cache(), second.new_cache())
    steps, length, ours = (20, 1, 1, 40, 1), 0, []
    for new_len in steps:
        token_ids = whole.token_ids[:, length : length + new_len]
        hidden = first.run(StageInput(token_ids=token_ids, cache=caches[0], past_len=length))
        logits = second.run(StageInput(hidden_states=hidden, cache=caches[1], past_len=length))
        length += new_len
        assert logits.device.type == "cuda"
        ours.append(logits.float().cpu())
    expected = whole.in_steps(steps)
    scale = max(float(logits.abs().max()) for logits in expected)
    assert difference(ours, expected) <= (1e-3 if dtype == "float32" else 0.1) * scale
