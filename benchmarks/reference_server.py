"""transformers `generate` in a process of its own, so that a mesh and its reference never share a core's time.

Reads one JSON line per measurement from standard input and answers with one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class TokenTimes:
    """A streamer that notes when each token came; the first call is the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _: Any) -> None:
        """Called by `generate` with the prompt and then with each token."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Called by `generate` at the end."""


def main() -> None:
    """Load, say so, and answer measurements until standard input ends."""
    model_dir, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        times = TokenTimes()
        output = model.generate(
            torch.tensor([request["prompt_ids"]]),
            max_new_tokens=request["max_tokens"],
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            streamer=times,
        )
        steps_s = [b - a for a, b in zip(times.times_s[1:], times.times_s[2:], strict=False)]
        token_ids = output[0, len(request["prompt_ids"]) :].tolist()
        print(json.dumps({"steps_s": steps_s, "token_ids": token_ids}), flush=True)


if __name__ == "__main__":
    main()
