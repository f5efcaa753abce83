"""Where a node's grammar matchers come from: one tokenizer and one worker, made when the first grammar comes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shard.grammar_worker import GrammarWorker
from shard.step_check import bad_step
from shared.messages import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from shard.grammar import GrammarMatcher


class GrammarSource:
    """Makes matchers for one model. `create` belongs to the compute thread.

    Args:
        tokenizer_json: The model's tokenizer.json; None, or a path that is not there, follows no grammar.
        end_ids: The model's end of sequence.
        vocab_size: Token ids are below this.
    """

    def __init__(self, tokenizer_json: Path | None, end_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer_json = tokenizer_json
        self._end_ids = tuple(end_ids)
        self._vocab_size = vocab_size
        self._worker = GrammarWorker()

    @property
    def can_follow(self) -> bool:
        """Whether the model has a tokenizer to follow grammars with."""
        return self._tokenizer_json is not None and self._tokenizer_json.is_file()

    def create(self, params: SamplingParams) -> GrammarMatcher:
        """A matcher at the beginning of these parameters' grammar.

        Raises:
            StepFailed: `bad_step` when the model has no tokenizer.json.
        """
        from shard.grammar import GrammarMatcher  # noqa: PLC0415 - nodes without grammars do without the library

        if not self.can_follow:
            raise bad_step("sampling.grammar", "cannot be followed: the model has no tokenizer.json")
        return GrammarMatcher(
            params.grammar,
            params.end_ids,
            vocab_size=self._vocab_size,
            tokenizer=lambda: self._tokenizer,
            worker=self._worker,
        )

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from shard.grammar import load_tokenizer  # noqa: PLC0415 - as above

        if self._tokenizer_json is None:
            raise ValueError("there is no tokenizer.json to load")
        return load_tokenizer(self._tokenizer_json.read_text(encoding="utf-8"), self._end_ids)
