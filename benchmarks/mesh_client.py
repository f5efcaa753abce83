"""Times one streamed chat completion at the client, and talks to the reference process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from transformers import PreTrainedTokenizerFast

from tests.support.fleet import REPO, child_env

FILLER = "The river carries leaves and light past the old mill, and nobody in the village counts the days. "
TASK = "Write a very long and detailed story about a lighthouse keeper. Do not stop early."


@dataclass(frozen=True)
class StreamTiming:
    """What the client saw: `decode_tokens_s` is over the tokens after the first."""

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_tokens_s: float


class Prompts:
    """User messages whose rendered prompt has about a given number of tokens."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model)

    def ids(self, content: str) -> list[int]:
        """The prompt as the gateway renders it."""
        messages = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def of_length(self, tokens: int) -> str:
        """A message that fills a context of about `tokens`."""
        missing = tokens - len(self.ids(TASK))
        per_sentence = len(self.tokenizer(FILLER * 10).input_ids) / 10
        return FILLER * max(0, round(missing / per_sentence)) + TASK


def stream_chat(base_url: str, content: str, max_tokens: int) -> StreamTiming:
    """One greedy streamed completion."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times_s: list[float] = []
    usage: dict[str, Any] = {}
    started_s = time.perf_counter()
    with httpx.stream("POST", base_url + "/v1/chat/completions", json=body, timeout=600) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                times_s.append(time.perf_counter())
    tokens = usage["completion_tokens"]
    return StreamTiming(
        usage["prompt_tokens"], tokens, times_s[0] - started_s, (tokens - 1) / (times_s[-1] - times_s[0])
    )


class ReferenceProcess:
    """The other side of `benchmarks.reference_server`."""

    def __init__(self, model: Path, dtype: str, threads: int = 1) -> None:
        command = [sys.executable, "-m", "benchmarks.reference_server", str(model), dtype, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO, env=child_env()
        )
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the reference process ended")
        return dict(json.loads(line))

    def generate(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Seconds of each step after the first token, and the tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt_ids": prompt_ids, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()
