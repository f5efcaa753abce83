"""What a draw with everything on adds to a decode step of the whole default model, on one thread.

The grammar's mask is computed on a worker while the layers run; what the step waits for is the draw alone. Both
are given: `draw_us` is on the critical path, `mask_us` is what the worker does beside it.
"""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher

from benchmarks.mesh_client import TASK, Prompts
from shard.drawing import Drawing, begin_drawing
from shard.grammar_source import GrammarSource
from shard.last_hop import begin_grammar, finish
from shard.loader import load_stage
from shard.runner import Pass
from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shard.tensor_io import to_wire
from shared.layers import LayerRange
from shared.messages import SamplingParams, Step
from shared.models.folder import read_config

TOKENS = 64
TARGET_SHARE = 0.10
SCHEMA = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "keeper": {"type": "boolean"}},
        "required": ["name", "age", "keeper"],
        "additionalProperties": False,
    },
}
"""Long enough that no answer of `TOKENS` tokens comes to its end."""


def settings(prompt_len: int, end_ids: tuple[int, ...]) -> dict[str, SamplingParams]:
    """From nothing to everything."""
    nucleus = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
    everything = {
        "grammar": LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
        "prompt_len": prompt_len,
        "end_ids": end_ids,
        "min_tokens": 8,
        "logit_bias": tuple((1000 * i, 0.5) for i in range(100)),
        "repetition_penalty": 1.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "min_p": 0.01,
        "top_k": 100,
        "logprobs": 20,
    }
    return {
        "greedy": SamplingParams(temperature=0.0),
        "nucleus": SamplingParams(**nucleus),
        "everything": SamplingParams(**nucleus, **everything),  # type: ignore[arg-type]
    }


class Session:
    """One session of the whole model, stepped by hand so that the parts of a step can be timed."""

    def __init__(self, stage: Stage, params: SamplingParams, grammars: GrammarSource) -> None:
        self.stage, self.params = stage, params
        self.cache: StageCache = stage.new_cache()
        self.drawing: Drawing | None = begin_drawing(params, grammars.create)
        self.forward_us: list[float] = []
        self.draw_us: list[float] = []

    def step(self, ids: list[int]) -> int:
        """Enter these ids and draw the next."""
        token_ids = torch.tensor([ids], dtype=torch.int32)
        past_len, wire = self.cache.length, to_wire(token_ids)
        history = self.drawing.history.write(past_len, wire) if self.drawing else None
        matcher = self.drawing.matcher if self.drawing else None
        step = Step(session="s", step_index=0, past_len=past_len, new_len=len(ids), layers=self.stage.layers, model="m")
        each = Pass(step, {"token_ids": wire}, self.cache, self.params, lambda: False, history, matcher)
        started_s = time.perf_counter()
        begin_grammar(each)
        output = self.stage.run(StageInput(token_ids=token_ids, cache=self.cache, past_len=past_len))
        computed_s = time.perf_counter()
        token = (finish(self.stage, each, output).token_ids or ())[0]
        self.forward_us.append((computed_s - started_s) * 1e6)
        self.draw_us.append((time.perf_counter() - computed_s) * 1e6)
        return token


def measure(stage: Stage, params: SamplingParams, grammars: GrammarSource, prompt_ids: list[int]) -> dict[str, Any]:
    """Medians over the decode steps of one answer."""
    session = Session(stage, params, grammars)
    answer = [session.step(prompt_ids)]
    while len(answer) < TOKENS:
        answer.append(session.step(answer[-1:]))
    forward_us, draw_us = (statistics.median(times[1:]) for times in (session.forward_us, session.draw_us))
    row = {"forward_us": round(forward_us), "draw_us": round(draw_us), "draw_us_max": round(max(session.draw_us[1:]))}
    return row | ({"mask_us": measure_masks(params, grammars, answer)} if params.grammar else {})


def measure_masks(params: SamplingParams, grammars: GrammarSource, answer: list[int]) -> int:
    """The median time from a token to the mask after it, when nothing else is done meanwhile."""
    matcher, times_us = grammars.create(params), []
    matcher.mask([])
    for count in range(1, len(answer)):
        started_s = time.perf_counter()
        matcher.mask(answer[:count])
        times_us.append((time.perf_counter() - started_s) * 1e6)
    return round(statistics.median(times_us))


def run(model: Path) -> dict[str, Any]:
    """Each setting in turn; the shares are of the greedy step, draw included."""
    torch.set_num_threads(1)
    stage = load_stage(model, LayerRange(0, read_config(model).num_layers), device="cpu", dtype="bfloat16")
    prompt_ids = Prompts(model).ids(TASK)
    grammars = GrammarSource(model / "tokenizer.json", stage.end_ids, stage.vocab_size)
    started_s = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: grammars.create(SamplingParams(grammar='start: "a"')).mask([])).result()
    tokenizer_s = time.perf_counter() - started_s
    rows = {
        name: measure(stage, params, grammars, prompt_ids)
        for name, params in settings(len(prompt_ids), stage.end_ids).items()
    }
    step_us = rows["greedy"]["forward_us"] + rows["greedy"]["draw_us"]
    return {
        "vocab_size": stage.vocab_size,
        "first_grammar_s": round(tokenizer_s, 2),
        "step_us": step_us,
        "rows": rows,
        "share_on_the_critical_path": round(rows["everything"]["draw_us"] / step_us, 4),
        "share_with_the_mask": round((rows["everything"]["draw_us"] + rows["everything"]["mask_us"]) / step_us, 4),
        "target_share": TARGET_SHARE,
    }
