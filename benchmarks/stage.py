"""The whole model as one stage on one thread: memory, speed, tokens and perplexity of each precision.

Speeds are of processor time, taken in turns with transformers' `generate` in bfloat16, so that other work on the
machine weighs on all alike. Tokens are greedy, and compared with those of `generate`, which packs no weights.
Perplexity is over `data/precision.txt`: prose of several kinds, and code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shard.linear.int8 import has_vnni
from shard.linear.packed import PackedLinear
from shard.loader import load_stage
from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shared.layers import LayerRange
from shared.models.folder import read_config

TEXT = Path(__file__).parent / "data" / "precision.txt"
PROMPT_TOKENS = 64
PROMPTS_AT = (0, 700)
"""Where in the text the prompts begin: prose, and code."""
DECODE_TOKENS = 32
ROUNDS = 2
HEAD_ROWS = 64
"""Positions whose logits are computed at once."""
TARGETS = {"none": 1.6, "int8": 3.3, "int4": 3.3}
"""Decode speed of each quantization over that of transformers' `generate`, both in bfloat16; they assume a CPU with
instructions for bfloat16 and for products of 8 bits."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens after a prompt, and processor seconds of the prompt and of the median step."""

    prefill_s: float
    step_s: float
    tokens: list[int]


Answers = Callable[[list[int]], Answer]


def stage_answers(stage: Stage) -> Answers:
    """Our own decode loop."""

    def answer(prompt_ids: list[int]) -> Answer:
        cache = stage.new_cache()
        started_s = time.thread_time()
        logits = stage.run(StageInput(token_ids=torch.tensor([prompt_ids]), cache=cache))
        prefill_s = time.thread_time() - started_s
        tokens, steps_s = [int(logits.argmax())], []
        while len(tokens) < DECODE_TOKENS:
            started_s = time.thread_time()
            logits = stage.run(StageInput(token_ids=torch.tensor([tokens[-1:]]), cache=cache, past_len=cache.length))
            steps_s.append(time.thread_time() - started_s)
            tokens.append(int(logits.argmax()))
        return Answer(prefill_s, median(steps_s), tokens)

    return answer


class Times:
    """A streamer for `generate` that notes the processor time of each token; the first call is the prompt."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, _: Any) -> None:
        """Called with the prompt, and with each token."""
        self.at_s.append(time.thread_time())

    def end(self) -> None:
        """Called at the end."""


def generate_answers(model: Path) -> Answers:
    """Transformers itself in bfloat16."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def answer(prompt_ids: list[int]) -> Answer:
        times = Times()
        ids = whole.generate(
            torch.tensor([prompt_ids]),
            min_new_tokens=DECODE_TOKENS,
            max_new_tokens=DECODE_TOKENS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            streamer=times,
        )
        steps_s = [after - before for before, after in zip(times.at_s[1:], times.at_s[2:], strict=False)]
        return Answer(times.at_s[1] - times.at_s[0], median(steps_s), ids[0, len(prompt_ids) :].tolist())

    return answer


def perplexity(stage: Stage, ids: list[int]) -> float:
    """Of the text, in one prefill."""
    token_ids = torch.tensor([ids])
    cache: StageCache = stage.new_cache()
    head_inputs = stage.run(StageInput(token_ids=token_ids, head_inputs=True, cache=cache))[:-1]
    loss = 0.0
    for start in range(0, len(head_inputs), HEAD_ROWS):
        part = head_inputs[start : start + HEAD_ROWS]
        next_ids = token_ids[0, start + 1 : start + 1 + len(part)]
        loss += float(torch.nn.functional.cross_entropy(stage.run_head(part).float(), next_ids, reduction="sum"))
    return math.exp(loss / len(head_inputs))


def agreements(answers: list[Answer], others: list[Answer]) -> list[int]:
    """For each prompt, how many tokens are the same before the first that differs."""
    pairs = zip(answers[: len(PROMPTS_AT)], others, strict=False)
    return [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine.tokens, theirs.tokens, strict=True)))
        for mine, theirs in pairs
    ]


def speeds(generated: list[Answer], own: list[Answer]) -> dict[str, Any]:
    """What a stage's answers show beside those of `generate` of the same turns."""
    turns = list(zip(generated, own, strict=True))
    return {
        "step_ms": round(median(mine.step_s for mine in own) * 1e3, 1),
        "generate_step_ms": round(median(theirs.step_s for theirs in generated) * 1e3, 1),
        "decode_over_generate": round(median(theirs.step_s / mine.step_s for theirs, mine in turns), 2),
        "prefill_s": round(median(mine.prefill_s for mine in own), 2),
        "prefill_over_generate": round(median(theirs.prefill_s / mine.prefill_s for theirs, mine in turns), 2),
        "tokens_as_generate": agreements(own, generated),
    }


def run(model: Path) -> dict[str, Any]:
    """Every precision, first in turns with `generate`, against which the ratios are, then alone over the text."""
    torch.set_num_threads(1)
    layers = LayerRange(0, read_config(model).num_layers)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    stages = [load_stage(model, layers, device="cpu", dtype="bfloat16", quantize=quantize) for quantize in TARGETS]
    answers = [generate_answers(model), *map(stage_answers, stages)]
    prompts = [ids[start : start + PROMPT_TOKENS] for start in PROMPTS_AT]
    turns = [[answer(prompt) for answer in answers] for _ in range(ROUNDS) for prompt in prompts]
    generated, *owns = ([turn[index] for turn in turns] for index in range(len(answers)))
    rows = [
        weights_row(stage) | speeds(generated, own) | {"decode_target": TARGETS[stage.quantize]}
        for stage, own in zip(stages, owns, strict=True)
    ]
    del answers  # and with it transformers' copy of the weights
    stages.append(load_stage(model, layers, device="cpu", dtype="float32"))
    exact = list(map(stage_answers(stages[-1]), prompts))
    rows.append(weights_row(stages[-1]) | {"tokens_as_generate": agreements(exact, generated)})
    for row, own in zip(rows, owns, strict=False):
        row["tokens_as_float32"] = agreements(own, exact)
    for row, stage in zip(rows, stages, strict=True):
        row["perplexity"] = round(perplexity(stage, ids), 4)
        row["perplexity_change"] = round(row["perplexity"] / rows[0]["perplexity"] - 1, 4)
        print(row, flush=True)
    return {
        "text_tokens": len(ids),
        "prompt_tokens": PROMPT_TOKENS,
        "decoded_tokens": DECODE_TOKENS,
        "rounds": ROUNDS,
        "has_vnni": has_vnni(),
        "rows": rows,
    }


def weights_row(stage: Stage) -> dict[str, Any]:
    """What a row begins with."""
    kernels = {module.name for module in stage._model.modules() if isinstance(module, PackedLinear)}  # noqa: SLF001
    return {
        "dtype": str(stage.dtype).removeprefix("torch."),
        "quantize": stage.quantize,
        "kernels": sorted(kernels),
        "weights_mb": round(stage.weight_bytes / 1e6),
    }
