"""One choice while it is being written: tokens go in, what they show comes out, and at the end the reason.

Streaming and non-streaming calls, of every endpoint, read their answers from here and from nowhere else, so
they cannot differ. A token's way: detokenizer (whole characters), parser (content, reasoning, tool calls),
stop strings (in content alone, so that none can tear a tool call or the end of a reasoning apart).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from gateway.detokenizer import Detokenizer
from gateway.generation_request import Token
from gateway.logprobs import LogprobEntry, Spell, logprob_entry
from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.parsing.parser import OutputParser
from gateway.stop import StopMatcher

FinishReason = Literal["stop", "length", "tool_calls"]
CALL_ID_BYTES = 12


@dataclass(slots=True)
class Piece:
    """What one token adds to a choice.

    Args:
        events: What it shows, in order; often nothing, while a marker or a character is incomplete.
        logprobs: Of the token itself, whether it shows or not, where they were asked for.
        token_id: The token itself.
    """

    events: list[Event]
    token_id: int
    logprobs: LogprobEntry | None = None


@dataclass(slots=True)
class ToolCall:
    """A call that an answer makes; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Transcript:
    """Everything that an answer has shown so far.

    Args:
        pieces: What each token added, in order: what an encoder needs that keeps content and calls in their order.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Take in a piece."""
        self.pieces.append(piece)
        self.token_ids.append(piece.token_id)
        if piece.logprobs is not None:
            self.logprobs.append(piece.logprobs)
        for event in piece.events:
            match event:
                case Content():
                    self.content += event.text
                case Reasoning():
                    self.reasoning += event.text
                case ToolCallBegin():
                    self.tool_calls.append(ToolCall(event.call_id or "", event.name))
                case ToolCallArguments():
                    self.tool_calls[event.index].arguments += event.text


def mint_call_id() -> str:
    """A fresh id for a tool call."""
    return f"call_{secrets.token_hex(CALL_ID_BYTES)}"


class Answer:
    """The text of one choice.

    Args:
        detokenizer: Fresh, for this answer alone.
        parser: Fresh, for this answer alone.
        stop: Fresh, for this answer alone.
        eos_ids: Ids that end the answer; they are counted, not shown.
        max_tokens: Tokens after which the answer is cut.
        min_tokens: Tokens before which no stop string is looked for.
        stop_ids: Those of `eos_ids` that the caller named.
        calls_max: Calls after which another one ends the answer instead; None for any number.
        names_calls: False where the caller chose the function, so that a finished call is no news: then the
            reason is `stop`.
        spell: Text and bytes of a token, for log-probabilities.
        mint_id: Makes ids of tool calls.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: OutputParser,
        stop: StopMatcher,
        *,
        eos_ids: Collection[int],
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        calls_max: int | None = None,
        names_calls: bool = True,
        spell: Spell | None = None,
        mint_id: Callable[[], str] = mint_call_id,
    ) -> None:
        self._detokenizer = detokenizer
        self._parser = parser
        self._stop = stop
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self._calls_max = calls_max
        self._has_calls_enough = False
        self._names_calls = names_calls
        self._spell = spell
        self._mint_id = mint_id
        self.transcript = Transcript()
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None if max_tokens else "length"
        self.stop_reason: str | int | None = None

    @property
    def has_finished(self) -> bool:
        """Whether `finish_reason` is set: nothing more may be pushed."""
        return self.finish_reason is not None

    def push(self, token: Token) -> Piece:
        """Take the next token and return what it shows.

        With the last token `finish_reason` is set, and what was held back comes out too. `stop_reason` is then the
        stop string, or the caller's own stop token, that ended the answer; None otherwise.

        Raises:
            ValueError: If the answer has already finished.
        """
        if self.has_finished:
            raise ValueError("the answer has finished")
        self.completion_tokens += 1
        ended = token.id in self._eos_ids
        text = "" if ended else self._detokenizer.push(token.id)
        parsed = self._parser.push(text) if text else []
        if ended or self.completion_tokens >= self._max_tokens:
            parsed += self._parser.finish()
        events = self._stopped(parsed)
        self._count_reasoning(events)
        self._finish(token.id, events, ended=ended)
        logprobs = None
        if token.logprobs is not None and self._spell is not None:
            logprobs = logprob_entry(token.id, token.logprobs, self._spell)
        piece = Piece(events, token.id, logprobs)
        self.transcript.add(piece)
        return piece

    def _stopped(self, parsed: list[Event]) -> list[Event]:
        """The events up to a stop string in the content, or to a call too many; calls with their ids."""
        events: list[Event] = []
        looks = self.completion_tokens >= self._min_tokens
        for event in parsed:
            if isinstance(event, Content) and looks:
                shown = self._stop.push(event.text)
                if shown:
                    events.append(Content(shown))
                if self._stop.matched is not None:
                    break
            elif isinstance(event, ToolCallBegin):
                if event.index == self._calls_max:
                    self._has_calls_enough = True
                    break
                self._flush_stop(events)
                events.append(event if event.call_id else replace(event, call_id=self._mint_id()))
            else:
                events.append(event)
        return events

    def _flush_stop(self, events: list[Event]) -> None:
        held = self._stop.flush()
        if held:
            events.append(Content(held))

    def _count_reasoning(self, events: list[Event]) -> None:
        if any(isinstance(event, Reasoning) for event in events):
            self.reasoning_tokens += 1

    def _finish(self, token_id: int, events: list[Event], *, ended: bool) -> None:
        if self._stop.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stop.matched
        elif ended or self._has_calls_enough:
            self._flush_stop(events)
            calls = self.transcript.tool_calls or any(isinstance(event, ToolCallBegin) for event in events)
            self.finish_reason = "tool_calls" if calls and self._names_calls else "stop"
            self.stop_reason = token_id if token_id in self._stop_ids else None
        elif self.completion_tokens >= self._max_tokens:
            self._flush_stop(events)
            self.finish_reason = "length"
