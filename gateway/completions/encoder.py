"""What a text completion looks like on the wire, as one JSON body or as server-sent events.

Order of a stream: where there are several choices, an empty frame for each, so that clients see them in the order
of their indices; for each choice its prompt if it is echoed, its text as it comes, and a frame with no text and why it
ended; usage when asked for; `DONE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.answer import Answer, Piece
from gateway.answer_encoder import Usage
from gateway.chat_encoder import CompletionIdentity, usage_json
from gateway.completions.echo import Prompt
from gateway.completions.logprobs import (
    LogprobRow,
    TextOffsets,
    answer_row,
    mean_logprob,
    prompt_rows,
    rows_json,
)
from gateway.detokenizer import Detokenizer
from gateway.generation_request import PromptScores
from gateway.logprobs import LogprobEntry, Spell
from gateway.openai_errors import ApiError, json_bytes
from gateway.parsing.events import Content
from gateway.sse import DONE, KEEP_ALIVE, error_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What a response shows.

    Args:
        prompts: Of the call.
        n: Choices that are shown for each.
        best_of: Choices that are generated for each; more than `n` only where nothing is streamed.
        echo: Each choice's text begins with its prompt.
        logprobs: Log-probabilities of every token, of an echoed prompt too.
        token_ids: Ids of prompts and answers.
        include_usage: A stream ends with a usage frame, and every other frame has ``"usage": null``.
        continuous_usage: Every frame has the usage so far instead.
    """

    prompts: tuple[Prompt, ...]
    n: int = 1
    best_of: int = 1
    echo: bool = False
    logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(len(prompt.ids) for prompt in self.prompts)


@dataclass(slots=True)
class _Choice:
    """What is known of one choice while it is written; `rows` and `token_ids` go with its next frame."""

    prompt: int
    offsets: TextOffsets
    has_begun: bool = False
    rows: list[LogprobRow] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class CompletionEncoder:
    """An `AnswerEncoder` for text completions.

    Args:
        identity: Repeated in every frame.
        options: What is shown.
        scores: The scored prompt of each index, where an echo has log-probabilities.
        detokenizer: Makes fresh ones for answers to a prompt.
        spell: Text and bytes of a token.
    """

    keep_alive = KEEP_ALIVE
    works_in_threads = True

    def __init__(
        self,
        identity: CompletionIdentity,
        options: CompletionOptions,
        *,
        scores: Callable[[int], PromptScores],
        detokenizer: Callable[[Sequence[int]], Detokenizer],
        spell: Spell,
    ) -> None:
        self._identity = identity
        self._options = options
        self._scores = scores
        self._spell = spell
        self.prompt_tokens_shown = options.prompt_tokens * options.n if options.echo or options.token_ids else 0
        self._completion_tokens = 0
        self._head = b"data: " + json_bytes(self._shared())[:-1]
        self._prompt_rows: dict[int, list[LogprobRow]] = {}
        self._choices = [
            _Choice(index, TextOffsets(detokenizer(prompt.ids), len(prompt.text)))
            for index, prompt in enumerate(options.prompts)
            for _ in range(options.best_of)
        ]

    def begin(self, _scores: PromptScores) -> bytes:
        """Where there are several choices, an empty frame for each."""
        if len(self._choices) == 1:
            return b""
        return b"".join([self._frame(index, "") for index in range(len(self._choices))])

    def piece(self, choice: int, piece: Piece) -> bytes:
        """A frame where the token shows text; what it brings along otherwise goes with the next one."""
        frames = self._begin_choice(choice)
        self._completion_tokens += 1
        state = self._choices[choice]
        if self._options.logprobs and piece.logprobs is not None:
            state.rows.append(answer_row(piece.logprobs, state.offsets.push(piece.token_id)))
        if self._options.token_ids:
            state.token_ids.append(piece.token_id)
        text = "".join([event.text for event in piece.events if isinstance(event, Content)])
        return frames + self._frame(choice, text) if text else frames

    def finish(self, choice: int, answer: Answer) -> bytes:
        """No text, and why the choice ended."""
        extra = {} if answer.stop_reason is None else {"stop_reason": answer.stop_reason}
        return self._begin_choice(choice) + self._frame(choice, "", answer.finish_reason, extra=extra)

    def end(self, usage: Usage) -> bytes:
        """Usage, only on request, and the end of the stream."""
        if not self._options.include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + json_bytes(usage_json(usage)) + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        """Nested, as the only form that every client notices."""
        return error_frame(error)

    def whole(self, answers: Sequence[Answer], _scores: PromptScores, usage: Usage) -> bytes:
        """The whole answer of a call that does not stream."""
        shown = [choice for prompt in range(len(self._options.prompts)) for choice in self._best(prompt, answers)]
        choices = [self._choice(index, choice, answers[choice]) for index, choice in enumerate(shown)]
        return json_bytes({**self._shared(), "choices": choices, "usage": usage_json(usage)})

    def _shared(self) -> dict[str, object]:
        return {
            "id": self._identity.completion_id,
            "object": "text_completion",
            "created": self._identity.created,
            "model": self._identity.model,
            "system_fingerprint": self._identity.fingerprint,
        }

    def _best(self, prompt: int, answers: Sequence[Answer]) -> list[int]:
        """Those of a prompt's choices that are shown: all in their order, or the likeliest, best first."""
        generated = range(prompt * self._options.best_of, (prompt + 1) * self._options.best_of)
        if self._options.n == self._options.best_of:
            return list(generated)
        by_likelihood = sorted(generated, key=lambda choice: -mean_logprob(answers[choice].transcript.logprobs))
        return by_likelihood[: self._options.n]

    def _choice(self, index: int, number: int, answer: Answer) -> dict[str, object]:
        transcript, prompt = answer.transcript, self._prompt_of(number)
        choice: dict[str, object] = {
            "index": index,
            "text": prompt.text + transcript.content,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        if self._options.logprobs:
            rows = self._answer_rows(number, transcript.token_ids, transcript.logprobs)
            choice["logprobs"] = rows_json(self._echoed_rows(number) + rows)
        if answer.stop_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        if self._options.token_ids:
            choice |= {"prompt_token_ids": prompt.ids, "token_ids": transcript.token_ids}
        return choice

    def _answer_rows(self, number: int, ids: Sequence[int], entries: Sequence[LogprobEntry]) -> list[LogprobRow]:
        offsets = self._choices[number].offsets
        return [answer_row(entry, offsets.push(token_id)) for token_id, entry in zip(ids, entries, strict=True)]

    def _begin_choice(self, number: int) -> bytes:
        """What comes before a choice's first token: its prompt, where it is echoed."""
        state = self._choices[number]
        if state.has_begun:
            return b""
        state.has_begun = True
        extra: dict[str, object] = {}
        if self._options.token_ids:
            extra["prompt_token_ids"] = self._prompt_of(number).ids
        if not self._options.echo and not extra:
            return b""
        state.rows = list(self._echoed_rows(number)) if self._options.logprobs else []
        return self._frame(number, self._prompt_of(number).text, extra=extra)

    def _echoed_rows(self, number: int) -> list[LogprobRow]:
        """A prompt's rows; computed once for all of its choices."""
        if not self._options.echo:
            return []
        index = self._choices[number].prompt
        if index not in self._prompt_rows:
            prompt = self._options.prompts[index]
            self._prompt_rows[index] = prompt_rows(prompt.ids, prompt.offsets, self._scores(index), self._spell)
        return self._prompt_rows[index]

    def _prompt_of(self, number: int) -> Prompt:
        return self._options.prompts[self._choices[number].prompt]

    def _frame(
        self, number: int, text: str, reason: str | None = None, *, extra: Mapping[str, object] | None = None
    ) -> bytes:
        state = self._choices[number]
        choice: dict[str, object] = {"index": number, "text": text, "logprobs": None, "finish_reason": reason}
        choice |= extra or {}
        if state.rows:
            choice["logprobs"], state.rows = rows_json(state.rows), []
        if state.token_ids:
            choice["token_ids"], state.token_ids = state.token_ids, []
        return self._head + b',"choices":[' + json_bytes(choice) + b"]" + self._usage_so_far() + b"}\n\n"

    def _usage_so_far(self) -> bytes:
        if self._options.continuous_usage:
            usage = Usage(prompt_tokens=self._options.prompt_tokens, completion_tokens=self._completion_tokens)
            return b',"usage":' + json_bytes(usage_json(usage))
        return b',"usage":null' if self._options.include_usage else b""
