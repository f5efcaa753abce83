"""The reference every mesh is held to: the same model in one process, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

NO_TOKEN = 10**9
"""Beyond any vocabulary: `generate` would otherwise take the model's own end of sequence."""


@dataclass(frozen=True)
class Answer:
    """What one greedy generation gave."""

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str


def chat_messages(content: str, system: str | None = None) -> list[dict[str, str]]:
    """A user's message, after the system's; without one, most templates write their own."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": content}]


class Reference:
    """transformers `generate`, greedy, float32, one sequence."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = set(eos if isinstance(eos, list) else [eos]) | {self.tokenizer.eos_token_id}

    def prompt_ids(self, content: str, system: str | None = None) -> list[int]:
        """One user message through the chat template, after a system message if there is to be one."""
        messages = chat_messages(content, system)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def greedy(self, content: str, max_tokens: int, system: str | None = None) -> Answer:
        """The answer that a greedy chat completion must give."""
        prompt_ids = self.prompt_ids(content, system)
        token_ids = self.greedy_ids(prompt_ids, max_tokens, eos_ids=sorted(self.eos_ids))
        ended = token_ids[-1] in self.eos_ids
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Answer(len(prompt_ids), token_ids, text, "stop" if ended else "length")

    def greedy_ids(self, prompt_ids: list[int], max_tokens: int, eos_ids: Sequence[int] = ()) -> list[int]:
        """Greedy tokens after a prompt; without `eos_ids` nothing ends them but `max_tokens`."""
        output = self.model.generate(
            torch.tensor([prompt_ids]),
            generation_config=GenerationConfig(
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=list(eos_ids) or [NO_TOKEN],
                pad_token_id=self.tokenizer.pad_token_id,
            ),
        )
        return list(output[0, len(prompt_ids) :].tolist())
