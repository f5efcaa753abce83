"""One architecture's parity: the whole model, and the same cut into nodes, taking the same steps.

`judge` builds a tiny model, finds out whether it is served and how, compares what the cut model says with what
transformers says of the whole, goes back some positions and compares again, and gives the row that docs/models.md has
of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from shard.kv_layers import REWIND_KEPT, AbsentLayer, WindowLayer
from shard.loader import load_stage, read_refused_cuts
from shard.model_kind import read_kind
from shard.stage import Stage, StageInput
from shared.errors import LoadFailed
from shared.layers import LayerRange
from tests.support.architectures import NUM_LAYERS, VOCAB_SIZE, WINDOW, tiny_config

TOLERANCE = 1e-4
"""Largest difference between logits, in float32."""
STEPS = (WINDOW - 2, *(1,) * 13)
"""A prefill, then decode steps across the edge of a sliding window and of a chunk."""
BACK_TO = sum(STEPS) - 4
"""Where the cut models then go back to; the window has moved on by then."""
STEPS_AFTER = (WINDOW - 2, *(1,) * (BACK_TO - WINDOW + 2 + 6))
"""What the whole takes in their place: the same, and six other tokens from there on."""
LARGEST = 1_500_000
"""Parameters of a model that is still tiny; what is larger has a field that was not shrunk."""
GAIN = 4.0
"""Initial weights are enlarged, so that logits depend on what layers do and not on the last token alone."""

DEPENDENCE = 10 * TOLERANCE
"""Another token a few positions ago changes the logits at least so much."""
RECENT = 4
"""How many positions ago: within every window."""

CACHE_NAMES: Mapping[str, str] = {
    "GrowingLayer": "full",
    "WindowLayer": "window",
    "IndexedLayer": "indexed",
    "LinearAttentionLayer": "linear state",
    "LinearAttentionAndFullAttentionLayer": "linear state + full",
    "LinearAttentionAndSlidingWindowAttentionLayer": "linear state + window",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What docs/models.md says of one architecture.

    Args:
        model_type: As config.json names it.
        caches: Kinds of slots that its layers have.
        rewind: How far a session can go back.
        cuts: Where it cannot be cut, in the tiny model of six layers, and why.
        verdict: ``served``, or the reason why not or not fully.
    """

    model_type: str
    caches: str
    rewind: str
    cuts: str
    verdict: str

    def as_line(self) -> str:
        """A line of the table."""
        return f"| `{self.model_type}` | {self.caches} | {self.rewind} | {self.cuts} | {in_words(self.verdict)} |"


ERRORS_IN_WORDS = {
    "AttributeError": "since its code looks for something that is not there",
    "IndexError": "since its code takes a part that is not there",
    "RuntimeError": "since its code meets sizes that do not fit",
    "TypeError": "since its code cannot be called so",
    "ValueError": "since its code refuses what it is given",
}
ERROR_CHARS_MAX = 60
"""How much of an error's own words a verdict repeats."""


def in_words(verdict: str) -> str:
    """A verdict as a sentence: an exception of a model's code by its kind in words, and its message for who looks."""
    match = re.search(rf"(,|:) ({'|'.join(ERRORS_IN_WORDS)}): (.*)", verdict)
    if match is None:
        return verdict
    message = match[3] if len(match[3]) <= ERROR_CHARS_MAX else match[3][:ERROR_CHARS_MAX].rstrip() + "…"
    return f"{verdict[: match.start()]}, {ERRORS_IN_WORDS[match[2]]}: `{message.replace('`', chr(39))}`"


def judge(model_type: str, folder: Path) -> Row:
    """The row of one architecture.

    Raises:
        AssertionError: A model that is served gives other logits than transformers.
    """
    config = tiny_config(model_type)
    config.architectures = None
    config.save_pretrained(folder)
    try:
        refused_cuts = read_refused_cuts(folder)  # there are no weights yet to read
    except LoadFailed as error:
        return Row(model_type, "", "", "", f"refused: {_one_line(error.message)}")
    whole = build_whole(folder)
    cuts = [ranges_between(bounds) for bounds in choose_cuts(refused_cuts)]
    stages = [[load_stage(folder, layers, device="cpu") for layers in cut] for cut in cuts]
    reasons = [stage.no_cache_reason for cut in stages for stage in cut if not stage.supports_kv_cache]
    token_ids = torch.randint(3, VOCAB_SIZE, (1, sum(STEPS)), generator=torch.Generator().manual_seed(7))
    expected = reference(whole, token_ids, STEPS, cached=not reasons)
    assert _change(whole, token_ids) >= DEPENDENCE, "logits that hardly depend on earlier tokens prove little"
    ids_after = torch.cat((token_ids[:, :BACK_TO], token_ids[:, : sum(STEPS_AFTER) - BACK_TO]), dim=1)
    expected_after = [] if reasons else reference(whole, ids_after, STEPS_AFTER, cached=True)
    for cut in stages:
        mesh = CutModel(cut, cached=not reasons)
        _compare(mesh, [mesh.step(token_ids, new_len) for new_len in STEPS], expected)
        if not reasons:
            mesh.go_back(BACK_TO)
            after = [mesh.step(ids_after, 1) for _ in range(sum(STEPS_AFTER) - BACK_TO)]
            _compare(mesh, after, expected_after[-len(after) :])
    caches, rewind = ("none", "") if reasons else (_describe_caches(stages[0]), _describe_rewind(stages[1]))
    return Row(model_type, caches, rewind, _describe_cuts(refused_cuts), _verdict(refused_cuts, reasons))


def _compare(mesh: CutModel, ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))
    assert difference <= TOLERANCE, f"{[str(stage.layers) for stage in mesh.stages]} differ by {difference}"


def build_whole(folder: Path) -> PreTrainedModel:
    """Give the config in a folder random weights; the text part of a larger model is stored as such models are."""
    kind = read_kind(folder)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in kind.model_class(kind.config).parameters())
    assert num_parameters <= LARGEST, f"{num_parameters} parameters: which field was not shrunk?"
    torch.manual_seed(0)
    model = kind.model_class._from_config(kind.config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name and "embed" not in name and parameter.abs().max() < 0.2:
                parameter.mul_(GAIN)
    text = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    if kind.is_part:
        _store_as_part(folder)
    return model


def _store_as_part(folder: Path) -> None:
    """Rename as checkpoints of larger models do, beside a layer of another part."""
    file = folder / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    other = {"model.vision_tower.layers.0.weight": torch.zeros(3)}
    file.unlink()
    save_file({**tensors, **other}, file, metadata={"format": "pt"})


def choose_cuts(refused: Mapping[int, str]) -> list[tuple[int, ...]]:
    """In three as evenly as can be, and in as many nodes as there can be: single layers, each kind by itself."""
    allowed = [cut for cut in range(1, NUM_LAYERS) if cut not in refused]
    near = sorted(allowed, key=lambda cut: min(abs(cut - 2), abs(cut - 4)))[:2]
    return [(0, *cuts, NUM_LAYERS) for cuts in (tuple(sorted(near)), tuple(allowed))]


def ranges_between(bounds: Sequence[int]) -> list[LayerRange]:
    """The layer ranges between these cuts."""
    return [LayerRange(start, end) for start, end in pairwise(bounds)]


def reference(
    model: PreTrainedModel, token_ids: torch.Tensor, steps: Sequence[int], *, cached: bool
) -> list[torch.Tensor]:
    """Logits after each of the steps, from transformers alone; positions are given as `generate` gives them."""
    names = inspect.signature(model.forward).parameters
    cache_name = next((name for name in ("cache", "past_key_values", "cache_params") if name in names), None)
    cache = DynamicCache(config=model.config) if cached else None
    logits = []
    with torch.no_grad():
        gives_positions = "position_ids" in names and _positions_are_from_zero(model, token_ids)
        for start, end in pairwise(accumulate(steps, initial=0)):
            first = start if cached else 0
            extra = {"position_ids": torch.arange(first, end).unsqueeze(0)} if gives_positions else {}
            if cached and cache_name:
                extra |= {cache_name: cache, "use_cache": True}
            logits.append(model(token_ids[:, first:end], **extra).logits[0, -1])
    return logits


def _change(model: PreTrainedModel, token_ids: torch.Tensor) -> float:
    """How much the last logits change with a token before them."""
    changed = token_ids.clone()
    changed[0, -RECENT] = (changed[0, -RECENT] + 1) % VOCAB_SIZE
    with torch.no_grad():
        before, after = (model(ids).logits[0, -1] for ids in (token_ids, changed))
    return float((before - after).abs().max())


def _positions_are_from_zero(model: PreTrainedModel, token_ids: torch.Tensor) -> bool:
    """Some models count positions from the padding token's id on, and have to be left alone."""
    positions = torch.arange(token_ids.shape[1]).unsqueeze(0)
    return torch.allclose(model(token_ids).logits, model(token_ids, position_ids=positions).logits, atol=1e-5)


class CutModel:
    """Stages in a row, each with its cache and a journal of what it was given, as a gateway keeps it.

    Args:
        stages: They cover the model.
        cached: Without, every step enters all positions again.
    """

    def __init__(self, stages: Sequence[Stage], *, cached: bool) -> None:
        self.stages = stages
        self._caches = [stage.new_cache() if cached else None for stage in stages]
        self._journals: list[list[StageInput]] = [[] for _ in stages]
        self._length = 0

    def step(self, token_ids: torch.Tensor, new_len: int) -> torch.Tensor:
        """Logits after the next positions of these ids, which go only to stages that need them."""
        self._length += new_len
        passed_on: torch.Tensor | None = None
        for stage, cache, journal in zip(self.stages, self._caches, self._journals, strict=True):
            first = self._length - new_len if cache else 0
            ids = token_ids[:, first : self._length] if stage.is_first or stage.needs_token_ids else None
            journal.append(StageInput(token_ids=ids, hidden_states=passed_on, cache=cache, past_len=first))
            passed_on = stage.run(journal[-1])
        assert passed_on is not None
        return passed_on

    def go_back(self, length: int) -> None:
        """To the first positions, up to where a step ended: by the cache where it can, else from the journal."""
        for i, (stage, cache) in enumerate(zip(self.stages, self._caches, strict=True)):
            assert cache is not None
            assert cache.can_rewind(length) == cache.rewinds, f"{stage.layers} announces something else"
            self._journals[i] = [item for item in self._journals[i] if item.past_len < length]
            if cache.rewinds:
                cache.rewind(length)
            else:
                self._replay(i)
        self._length = length

    def _replay(self, i: int) -> None:
        cache = self._caches[i] = self.stages[i].new_cache()
        self._journals[i] = [replace(item, cache=cache) for item in self._journals[i]]
        for item in self._journals[i]:
            self.stages[i].run(item)


def _describe_caches(stages: Sequence[Stage]) -> str:
    slots = [slot for stage in stages for slot in stage.new_cache().slots.layers if not isinstance(slot, AbsentLayer)]
    names = [CACHE_NAMES.get(type(slot).__name__, _as_words(type(slot).__name__)) for slot in slots]
    return ", ".join(dict.fromkeys(name for name in names if name != "none"))


def _describe_rewind(stages: Sequence[Stage]) -> str:
    """Of as many nodes as there can be."""
    caches = [stage.new_cache() for stage in stages]
    if not all(cache.rewinds for cache in caches):
        return "some nodes" if any(cache.rewinds for cache in caches) else "no"
    has_window = any(isinstance(slot, WindowLayer) for cache in caches for slot in cache.slots.layers)
    return f"{REWIND_KEPT} or more" if has_window else "any"


def _as_words(name: str) -> str:
    return "none" if name == "DummyLayer" else f"`{name}`"


def _describe_cuts(refused: Mapping[int, str]) -> str:
    if not refused:
        return ""
    reasons = list(dict.fromkeys(refused.values()))
    others = ", and so on" if len(reasons) > 1 else ""
    return f"before {', '.join(map(str, refused))}: {reasons[0]}{others}"


def _verdict(refused: Mapping[int, str], reasons: Sequence[str | None]) -> str:
    verdict = "served" if len(refused) < NUM_LAYERS - 1 else "served by one node alone"
    return f"{verdict}, without a cache: {_one_line(str(reasons[0]))}" if reasons else verdict


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")
