"""What a chat completion looks like on the wire, as one JSON body or as server-sent events.

Frames are written by hand around a prefix that is made once per stream, because one is sent per token. Order
of a stream: a `role` frame for each choice; content, reasoning and tool calls as they come; for each choice a frame
with an empty delta and why it ended; usage when asked for; `DONE`. Clients join what they are sent, so role, a
call's id and its name are sent exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.answer import Answer, Piece, Transcript
from gateway.answer_encoder import Usage
from gateway.generation_request import PromptScores
from gateway.logprobs import LogprobEntry, Spelled
from gateway.openai_errors import ApiError, json_bytes
from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.sse import DONE, KEEP_ALIVE, error_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionIdentity:
    """What every body and frame of one completion repeats.

    Args:
        completion_id: ``chatcmpl-…``.
        created: Unix seconds.
        model: The name the model is served under.
        fingerprint: Names the weights, so that a caller who sets a seed notices when they change.
    """

    completion_id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a response shows beside the answers.

    Args:
        include_usage: A stream ends with a usage frame, and every other frame has ``"usage": null``.
        continuous_usage: Every frame has the usage so far instead.
        logprobs: Log-probabilities of every token.
        token_ids: Ids of prompt and answer.
        prompt_ids: The prompt's, for `token_ids`.
        prompt_tokens: For the usage.
        service_tier: Echoed where the caller named one.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    service_tier: str | None = None


class ChatEncoder:
    """An `AnswerEncoder` for chat completions.

    Args:
        identity: Repeated in every frame.
        options: What is shown.
        choices: How many.
    """

    keep_alive = KEEP_ALIVE
    works_in_threads = True

    def __init__(self, identity: CompletionIdentity, options: ChatOptions, *, choices: int = 1) -> None:
        self._identity = identity
        self._options = options
        self._choices = choices
        self.prompt_tokens_shown = len(options.prompt_ids) * choices if options.token_ids else 0
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._head = b"data: " + json_bytes(self._shared("chat.completion.chunk"))[:-1]
        self._unsent = [_Unsent() for _ in range(choices)]

    def begin(self, _scores: PromptScores) -> bytes:
        """The only frames that name the role: one for each choice, so that clients see indices in order."""
        delta = b'{"role":"assistant","content":""}'
        extra = b',"prompt_token_ids":' + json_bytes(self._options.prompt_ids) if self._options.token_ids else b""
        frames = [self._frame(choice, delta, b"null", extra=extra) for choice in range(self._choices)]
        return b"".join(frames)

    def piece(self, choice: int, piece: Piece) -> bytes:
        """A frame for each event; what a token brings along with none goes with the next one."""
        self._completion_tokens += 1
        unsent = self._unsent[choice]
        if piece.logprobs is not None:
            unsent.logprobs.append(piece.logprobs)
        if self._options.token_ids:
            unsent.token_ids.append(piece.token_id)
        if any(isinstance(event, Reasoning) for event in piece.events):
            self._reasoning_tokens += 1
        return b"".join([self._frame(choice, _delta(event), b"null") for event in piece.events])

    def finish(self, choice: int, answer: Answer) -> bytes:
        """An empty delta and why the choice ended."""
        extra = b"" if answer.stop_reason is None else b',"stop_reason":' + json_bytes(answer.stop_reason)
        return self._frame(choice, b"{}", json_bytes(answer.finish_reason), extra=extra)

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
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = {**self._shared("chat.completion"), "choices": choices, "usage": usage_json(usage)}
        if self._options.token_ids:
            body["prompt_token_ids"] = self._options.prompt_ids
        return json_bytes(body)

    def _shared(self, kind: str) -> dict[str, object]:
        shared: dict[str, object] = {
            "id": self._identity.completion_id,
            "object": kind,
            "created": self._identity.created,
            "model": self._identity.model,
            "system_fingerprint": self._identity.fingerprint,
        }
        if self._options.service_tier is not None:
            shared["service_tier"] = "default"
        return shared

    def _choice(self, index: int, answer: Answer) -> dict[str, object]:
        transcript = answer.transcript
        choice: dict[str, object] = {
            "index": index,
            "message": message_json(transcript),
            "logprobs": logprobs_json(transcript.logprobs) if self._options.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        if answer.stop_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        if self._options.token_ids:
            choice["token_ids"] = transcript.token_ids
        return choice

    def _frame(self, choice: int, delta: bytes, reason: bytes, *, extra: bytes = b"") -> bytes:
        unsent = self._unsent[choice]
        logprobs = b"null"
        if unsent.logprobs:
            logprobs, unsent.logprobs = json_bytes(logprobs_json(unsent.logprobs)), []
        if unsent.token_ids:
            extra, unsent.token_ids = extra + b',"token_ids":' + json_bytes(unsent.token_ids), []
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]%b}\n\n' % (
            self._head, choice, delta, logprobs, reason, extra, self._usage_so_far()
        )  # fmt: skip

    def _usage_so_far(self) -> bytes:
        if self._options.continuous_usage:
            usage = Usage(
                prompt_tokens=self._options.prompt_tokens,
                completion_tokens=self._completion_tokens,
                reasoning_tokens=self._reasoning_tokens,
            )
            return b',"usage":' + json_bytes(usage_json(usage))
        return b',"usage":null' if self._options.include_usage else b""


class _Unsent:
    """What goes with a choice's next frame."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self) -> None:
        self.logprobs: list[LogprobEntry] = []
        self.token_ids: list[int] = []


def _delta(event: Event) -> bytes:
    match event:
        case Content():
            return b'{"content":' + json_bytes(event.text) + b"}"
        case Reasoning():
            text = json_bytes(event.text)
            return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
        case ToolCallBegin():
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.call_id, "type": "function", "function": function}
            return json_bytes({"tool_calls": [call]})
        case ToolCallArguments():
            return json_bytes({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})


def message_json(transcript: Transcript) -> dict[str, object]:
    """The message of a whole answer: content is null where there are only calls; no key is there for nothing."""
    content = None if transcript.tool_calls and not transcript.content else transcript.content
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if transcript.reasoning:
        message |= {"reasoning_content": transcript.reasoning, "reasoning": transcript.reasoning}
    if transcript.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in transcript.tool_calls
        ]
    return message


def logprobs_json(entries: Sequence[LogprobEntry]) -> dict[str, object]:
    """As chat completions write them."""
    content = [{**_spelled(entry.token), "top_logprobs": [_spelled(top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _spelled(token: Spelled) -> dict[str, object]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def usage_json(usage: Usage) -> dict[str, object]:
    """As the API writes it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
