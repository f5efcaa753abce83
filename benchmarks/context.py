"""Whether tokens/s stays flat as the context grows, with the cache and without it."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.mesh_client import Prompts, stream_chat
from tests.support.fleet import running_fleet

CONTEXTS = (100, 1000, 4000)
ROUNDS = 2
TOKENS = 48
STATELESS_TOKENS = {100: 6, 1000: 3, 4000: 2}
"""Few, since each one encodes the whole context again on every node."""
TARGETS = {1000: 0.9, 4000: 0.7}


def tokens_per_second(model: Path, dtype: str, *, cached: bool) -> dict[int, float]:
    """Median decode tokens/s by context, the contexts taken in turn."""
    prompts = {context: Prompts(model).of_length(context) for context in CONTEXTS}
    flags = ["--dtype", dtype, "--device", "cpu", "--threads", "1", *([] if cached else ["--no-kv-cache"])]
    seen: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(model, ["0:12", "12:24"], Path(folder), common_node_args=flags) as fleet,
    ):
        stream_chat(fleet.base_url, prompts[CONTEXTS[0]], 4)
        for _ in range(ROUNDS if cached else 1):
            for context, prompt in prompts.items():
                tokens = TOKENS if cached else STATELESS_TOKENS[context]
                seen[context].append(stream_chat(fleet.base_url, prompt, tokens).decode_tokens_s)
    return {context: statistics.median(values) for context, values in seen.items()}


def run(model: Path) -> dict[str, Any]:
    """Cached in both dtypes, stateless beside it."""
    rows = []
    for dtype in ("bfloat16", "float32"):
        cached = tokens_per_second(model, dtype, cached=True)
        row = {"dtype": dtype, "cached_tokens_s": {c: round(v, 2) for c, v in cached.items()}}
        row["ratio_to_100"] = {c: round(cached[c] / cached[100], 3) for c in TARGETS}
        rows.append(row)
    stateless = tokens_per_second(model, "bfloat16", cached=False)
    return {
        "rows": rows,
        "targets": TARGETS,
        "stateless_bfloat16_tokens_s": {c: round(v, 3) for c, v in stateless.items()},
    }
