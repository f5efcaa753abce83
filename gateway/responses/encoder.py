"""What a response looks like on the wire, as one JSON body or as server-sent events.

Order of a stream: `response.created`, `response.in_progress`; each output item from its `added` to its `done`;
`response.completed`, or `response.incomplete` where the answer was cut. Whole and streamed responses are made by the
same code from the same pieces, so they cannot differ. There is no ``[DONE]``: the last event says that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.answer import Answer, Piece, Transcript
from gateway.answer_encoder import Usage
from gateway.generation_request import PromptScores
from gateway.openai_errors import ApiError, json_bytes
from gateway.responses.items import Item, mint_item_id
from gateway.responses.output import Output, ResponseEvent
from gateway.sse import KEEP_ALIVE
from gateway.sse_event import named_event

CANCELLED = "response_cancelled"
"""The code of the error that ends a response which its caller has cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseIdentity:
    """What one response is.

    Args:
        response_id: ``resp_…``.
        created_at: Unix seconds.
        model: The name the model is served under.
        echo: Keys that repeat the request.
    """

    response_id: str
    created_at: int
    model: str
    echo: Mapping[str, object]


class ResponseEncoder:
    """An `AnswerEncoder` for responses, of one answer.

    Args:
        identity: What the response is.
        has_logprobs: Whether texts come with log-probabilities.
        unix_time: The wall clock.
        on_end: Called with the final response before its last byte is sent, so that the next call may build on it.
    """

    keep_alive = KEEP_ALIVE
    works_in_threads = False
    """A response is stored when it ends, and read by others while it runs."""
    prompt_tokens_shown = 0

    def __init__(
        self,
        identity: ResponseIdentity,
        *,
        has_logprobs: bool,
        unix_time: Callable[[], float],
        on_end: Callable[[dict[str, object]], None],
    ) -> None:
        self._identity = identity
        self._unix_time = unix_time
        self._on_end = on_end
        self._output = Output(mint_item_id, has_logprobs=has_logprobs)
        self._pieces = 0
        self._sent = 0
        self._is_cut = False

    def begin(self, _scores: PromptScores) -> bytes:
        """The response, twice, as yet without output."""
        response = self.response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._frames({"type": kind, "response": response} for kind in kinds)

    def piece(self, _choice: int, piece: Piece) -> bytes:
        """What a token adds to the output."""
        self._pieces += 1
        return self._frames(self._output.push(piece))

    def catch_up(self, transcript: Transcript) -> None:
        """Take in what has been generated and not streamed."""
        for piece in transcript.pieces[self._pieces :]:
            self._pieces += 1
            self._output.push(piece)

    def finish(self, _choice: int, answer: Answer) -> bytes:
        """The last item closes."""
        self._is_cut = answer.finish_reason == "length"
        return self._frames(self._output.finish(is_cut=self._is_cut))

    def end(self, usage: Usage) -> bytes:
        """The whole response, and how it ended."""
        response = self._final(usage)
        return self._frames([{"type": f"response.{response['status']}", "response": response}])

    def error(self, error: ApiError) -> bytes:
        """The response as far as it came, and then the error, in both of the forms that clients know.

        Node's client raises at an event named `error`, Python's at a top-level `error` key. A cancelled response is
        no error: it is incomplete.
        """
        opening = b"" if self._sent else self.begin(PromptScores())
        if error.code == CANCELLED:
            response = self.cancelled()
            self._on_end(response)
            return opening + self._frames([{"type": "response.incomplete", "response": response}])
        response = self.response("failed", error=_response_error(error))
        self._on_end(response)
        flat = {"code": error.code, "message": error.message, "param": error.param}
        failed = {"type": "response.failed", "response": response}
        raised = {"type": "error", **flat, "error": {"type": error.kind, **flat}}
        return opening + self._frames([failed, raised])

    def whole(self, answers: Sequence[Answer], _scores: PromptScores, usage: Usage) -> bytes:
        """The whole response of a call that does not stream."""
        (answer,) = answers
        self.catch_up(answer.transcript)
        self.finish(0, answer)
        return json_bytes(self._final(usage))

    def cancelled(self) -> dict[str, object]:
        """The response as its caller stopped it."""
        return self.response("cancelled")

    def response(
        self,
        status: str,
        *,
        usage: Usage | None = None,
        error: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """The response as it is now, all keys present."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._identity.response_id,
            "object": "response",
            "created_at": self._identity.created_at,
            "completed_at": int(self._unix_time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "model": self._identity.model,
            "output": self._items(status),
            "usage": None if usage is None else usage_json(usage),
            **self._identity.echo,
        }

    def _items(self, status: str) -> list[Item]:
        return self._output.items("in_progress" if status == "in_progress" else "incomplete")

    def _final(self, usage: Usage) -> dict[str, object]:
        response = self.response("incomplete" if self._is_cut else "completed", usage=usage)
        self._on_end(response)
        return response

    def _frames(self, events: Iterable[ResponseEvent]) -> bytes:
        frames = []
        for event in events:
            frames.append(named_event({"type": event["type"], "sequence_number": self._sent, **event}))
            self._sent += 1
        return b"".join(frames)


def usage_json(usage: Usage) -> dict[str, object]:
    """As responses write it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _response_error(error: ApiError) -> dict[str, object]:
    """As `response.error`: its codes are a closed list, of which two are a server's own."""
    code = "rate_limit_exceeded" if error.kind == "rate_limit_error" else "server_error"
    return {"code": code, "message": error.message}
