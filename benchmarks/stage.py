"""The whole model as one stage on one thread: memory, speed and perplexity of each precision, beside `generate`.

Speeds are tokens per second of processor time, taken in turns, so that other work on the machine weighs on all alike.
Perplexity is over `data/precision.txt`: prose of several kinds, and code.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shard.loader import load_stage
from shard.session_cache import StageCache
from shard.stage import Stage, StageInput
from shared.layers import LayerRange
from shared.models.folder import read_config

TEXT = Path(__file__).parent / "data" / "precision.txt"
Generate = Callable[[list[int]], tuple[float, float, list[int]]]
PRECISIONS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))
PROMPT_TOKENS = 64
DECODE_TOKENS = 8
ROUNDS = 3
HEAD_ROWS = 64
"""Positions whose logits are computed at once."""
TARGETS = {"none": 1.6, "int8": 3.3, "int4": 3.3}
"""Decode speed over that of transformers' `generate` in bfloat16."""


def decode_stage(stage: Stage, prompt_ids: list[int]) -> tuple[float, float, list[int]]:
    """Processor seconds of the prompt and of the median step, and the tokens."""
    cache = stage.new_cache()
    started_s = time.thread_time()
    logits = stage.run(StageInput(token_ids=torch.tensor([prompt_ids]), cache=cache))
    prefill_s = time.thread_time() - started_s
    tokens, steps_s = [], []
    for _ in range(DECODE_TOKENS):
        tokens.append(int(logits.argmax()))
        started_s = time.thread_time()
        logits = stage.run(StageInput(token_ids=torch.tensor([tokens[-1:]]), cache=cache, past_len=cache.length))
        steps_s.append(time.thread_time() - started_s)
    return prefill_s, statistics.median(steps_s), tokens


class Times:
    """A streamer for `generate` that notes the processor time of each token; the first call is the prompt."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, _: Any) -> None:
        """Called with the prompt, and with each token."""
        self.at_s.append(time.thread_time())

    def end(self) -> None:
        """Called at the end."""


def create_generate(model: Path) -> Generate:
    """Transformers itself in bfloat16, measured as `decode_stage` does."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def generate(prompt_ids: list[int]) -> tuple[float, float, list[int]]:
        times = Times()
        ids = whole.generate(
            torch.tensor([prompt_ids]),
            max_new_tokens=DECODE_TOKENS + 1,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            streamer=times,
        )
        steps_s = [after - before for before, after in zip(times.at_s[1:], times.at_s[2:], strict=False)]
        prefill_s = times.at_s[1] - times.at_s[0]
        return prefill_s, statistics.median(steps_s), ids[0, len(prompt_ids) : len(prompt_ids) + DECODE_TOKENS].tolist()

    return generate


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


def run(model: Path) -> dict[str, Any]:
    """All precisions, each in turns with `generate`, against which the ratios are."""
    torch.set_num_threads(1)
    layers = LayerRange(0, read_config(model).num_layers)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    generate = create_generate(model)
    rows = []
    for dtype, quantize in PRECISIONS:
        stage = load_stage(model, layers, device="cpu", dtype=dtype, quantize=quantize)
        rows.append(measure(stage, ids, generate))
    plain = next(row for row in rows if (row["dtype"], row["quantize"]) == ("bfloat16", "none"))
    for row in rows:
        row["perplexity_change"] = round(row["perplexity"] / plain["perplexity"] - 1, 4)
    return {"text_tokens": len(ids), "prompt_tokens": PROMPT_TOKENS, "rows": rows}


def measure(stage: Stage, ids: list[int], generate: Generate) -> dict[str, Any]:
    """One precision's row."""
    decode_ratios, prefill_ratios, ours, theirs = [], [], [], []
    for _ in range(ROUNDS):
        reference_prefill_s, reference_step_s, reference_tokens = generate(ids[:PROMPT_TOKENS])
        prefill_s, step_s, tokens = decode_stage(stage, ids[:PROMPT_TOKENS])
        decode_ratios.append(reference_step_s / step_s)
        prefill_ratios.append(reference_prefill_s / prefill_s)
        ours.append(step_s)
        theirs.append(reference_step_s)
    row = {
        "dtype": str(stage.dtype).removeprefix("torch."),
        "quantize": stage.quantize,
        "weights_mb": round(stage.weight_bytes / 1e6),
        "step_ms": round(statistics.median(ours) * 1e3, 1),
        "generate_step_ms": round(statistics.median(theirs) * 1e3, 1),
        "decode_over_generate": round(statistics.median(decode_ratios), 2),
        "target": None if stage.dtype is torch.float32 else TARGETS[stage.quantize],
        "prefill_over_generate": round(statistics.median(prefill_ratios), 2),
        "same_tokens": tokens == reference_tokens,
        "perplexity": round(perplexity(stage, ids), 4),
    }
    print(row, flush=True)
    return row
