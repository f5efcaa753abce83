"""Scoring a prompt: the log-probability of each of its tokens, given those before it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from gateway.generation_request import PromptScores
from gateway.journal import ids_input
from gateway.logprob_rows import read_rows
from gateway.probe import Asked
from shared.errors import StepFailed
from shared.tensor_spec import WireTensor

NO_TARGET = -1
"""In `target_ids`: nothing is to be scored after this position."""


class PromptScorer:
    """A `gateway.probe.Probe` that fills in `scores`, in whatever steps the prompt passes.

    Position p scores the token at p + 1, so the prompt's last position scores nothing, and is best left to the pass
    that draws: a result's rows are either those of targets or that of a drawn token.

    Args:
        prompt_ids: The prompt.
        top: How many of the likeliest tokens to name at each place.
        vocab_size: Entries of the model's vocabulary; None where that is not known.
    """

    def __init__(self, prompt_ids: Sequence[int], top: int, vocab_size: int | None = None) -> None:
        self.scores = PromptScores([None] * len(prompt_ids))
        self._ids = prompt_ids
        self._top = top
        self._vocab_size = vocab_size
        self._scored_len = 0

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its score."""
        return self._scored_len >= len(self._ids) - 1

    def ask(self, start: int, new_len: int) -> Asked | None:
        """Score what of the prompt follows the step's positions."""
        targets = self._targets(start, new_len)
        if self.is_complete or not targets:
            return None
        padded = array("i", [*targets, *[NO_TARGET] * (new_len - len(targets))])
        return Asked(score=self._top, tensors={"target_ids": ids_input(padded).tensor})

    def take(self, start: int, new_len: int, tensors: Mapping[str, WireTensor]) -> None:
        """Fill in the scores of a step's targets; equal ones overwrite equal ones.

        Raises:
            StepFailed: `bad_answer`.
        """
        targets = self._targets(start, new_len)
        rows = read_rows(tensors, rows=len(targets), top=self._top, vocab_size=self._vocab_size)
        if [token_id for token_id, _ in rows] != targets:
            raise StepFailed("bad_answer", "the last hop scored other tokens than it was given")
        self.scores.tokens[start + 1 : start + 1 + len(rows)] = [logprobs for _, logprobs in rows]
        self._scored_len = max(self._scored_len, start + len(rows))

    def _targets(self, start: int, new_len: int) -> list[int]:
        return list(self._ids[start + 1 : start + 1 + new_len])
