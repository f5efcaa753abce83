"""One answer while it is being written: token ids go in, visible text comes out, and at the end the reason.

Streaming and non-streaming calls read their text from here and from nowhere else, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from gateway.detokenizer import Detokenizer
from gateway.stop import StopMatcher

FinishReason = Literal["stop", "length"]


class Answer:
    """The text of one choice.

    Args:
        detokenizer: Fresh, for this answer alone.
        stop: Fresh, for this answer alone.
        eos_ids: Ids that end the answer; they are counted, not shown.
        max_tokens: Tokens after which the answer is cut.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: StopMatcher, *, eos_ids: Collection[int], max_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, token_id: int) -> str:
        """Take the next token and return the text to show for it, empty if none yet.

        With the last token `finish_reason` is set, and the text held back comes out too.

        Raises:
            ValueError: If the answer has already finished.
        """
        if self.finish_reason is not None:
            raise ValueError("the answer has finished")
        self.completion_tokens += 1
        if token_id in self._eos_ids:
            self.finish_reason = "stop"
            return self._stop.flush()
        text = self._stop.push(self._detokenizer.push(token_id))
        if self._stop.matched is not None:
            self.finish_reason = "stop"
        elif self.completion_tokens >= self._max_tokens:
            self.finish_reason = "length"
            text += self._stop.flush()
        return text
