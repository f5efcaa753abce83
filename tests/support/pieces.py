"""Pieces and answers by value, for tests of encoders."""

from __future__ import annotations

from typing import Any

from gateway.answer import Answer, Piece
from gateway.answer_encoder import AnswerEncoder, Usage
from gateway.detokenizer import ByteDetokenizer
from gateway.generation_request import PromptScores
from gateway.parsing.events import Event
from gateway.parsing.parser import PlainParser
from gateway.stop import StopMatcher

USAGE = Usage(prompt_tokens=3, completion_tokens=2, reasoning_tokens=1, cached_tokens=2)
SCORES = PromptScores()


def piece(*events: Event, **fields: Any) -> Piece:
    """A token that shows these."""
    return Piece(list(events), **{"token_id": 1, **fields})


def ended(pieces: list[Piece], *, reason: str = "stop", stop_reason: str | None = None) -> Answer:
    """An answer that has shown these pieces and ended so."""
    detokenizer = ByteDetokenizer(lambda _token_id: b"")
    answer = Answer(detokenizer, PlainParser(), StopMatcher(()), eos_ids={0}, max_tokens=1)
    for one in pieces:
        answer.transcript.add(one)
    answer.finish_reason = reason  # type: ignore[assignment]
    answer.stop_reason = stop_reason
    return answer


def streamed(encoder: AnswerEncoder, pieces: list[Piece], **end: Any) -> bytes:
    """The stream that an encoder makes of them."""
    frames = [encoder.begin(SCORES), *(encoder.piece(0, one) for one in pieces)]
    return b"".join([*frames, encoder.finish(0, ended(pieces, **end)), encoder.end(USAGE)])


def whole(encoder: AnswerEncoder, pieces: list[Piece], **end: Any) -> bytes:
    """The body that an encoder makes of them."""
    return encoder.whole([ended(pieces, **end)], SCORES, USAGE)
