"""The reference every mesh is held to: the same model in one process, through transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Answer:
    """What one greedy generation gave."""

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str


class Reference:
    """transformers `generate`, greedy, float32, one sequence."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = set(eos if isinstance(eos, list) else [eos]) | {self.tokenizer.eos_token_id}

    def prompt_ids(self, content: str) -> list[int]:
        """One user message through the chat template."""
        messages = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def greedy(self, content: str, max_tokens: int) -> Answer:
        """The answer that a greedy chat completion must give."""
        prompt_ids = self.prompt_ids(content)
        output = self.model.generate(
            torch.tensor([prompt_ids]),
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            eos_token_id=sorted(self.eos_ids),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        token_ids = output[0, len(prompt_ids) :].tolist()
        ended = token_ids[-1] in self.eos_ids
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Answer(len(prompt_ids), token_ids, text, "stop" if ended else "length")
