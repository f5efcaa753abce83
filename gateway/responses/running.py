"""Responses that are being made: each can be looked at, and stopped by its id."""

from __future__ import annotations

from typing import Protocol

from litestar.types import Receive, Scope, Send

from gateway.answer import Transcript
from gateway.answer_response import AnswerResponse
from gateway.edge import send_whole
from gateway.openai_errors import ApiError, json_bytes
from gateway.response_writer import STREAM_HEADERS
from gateway.responses.encoder import CANCELLED, ResponseEncoder

STATUS_CANCELLED = 409


class Running(Protocol):
    """A response that is being made."""

    def stop(self) -> dict[str, object]:
        """End it; returns it as it is then."""
        ...

    def shown(self) -> dict[str, object]:
        """The response as it is now."""
        ...


class RunningResponse:
    """The ASGI application of one response, which is known by its id while it runs.

    Args:
        response_id: Its id.
        answer: What generates and writes it.
        encoder: What `answer` writes with.
        transcript: What `answer` has generated.
        running: All responses that run.
        stream: Whether it streams.
    """

    def __init__(
        self,
        response_id: str,
        answer: AnswerResponse,
        encoder: ResponseEncoder,
        transcript: Transcript,
        running: dict[str, Running],
        *,
        stream: bool,
    ) -> None:
        self._id = response_id
        self._answer = answer
        self._encoder = encoder
        self._transcript = transcript
        self._running = running
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send.

        Raises:
            ApiError: As `AnswerResponse` does.
        """
        self._running[self._id] = self
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            if error.code != CANCELLED:
                raise
            await self._send_cancelled(error, send)
        finally:
            self._running.pop(self._id, None)  # it is there only if the response has not ended as one

    def stop(self) -> dict[str, object]:
        """End the generation; the caller who waits for it gets what there is."""
        self._answer.stop(ApiError(STATUS_CANCELLED, "The response was cancelled.", code=CANCELLED))
        self._encoder.catch_up(self._transcript)
        return self._encoder.cancelled()

    def shown(self) -> dict[str, object]:
        """The response as it is now."""
        self._encoder.catch_up(self._transcript)
        return self._encoder.response("in_progress")

    async def _send_cancelled(self, error: ApiError, send: Send) -> None:
        """Nothing has been sent yet: a cancelled response is an answer, no failure."""
        self._encoder.catch_up(self._transcript)
        frames = self._encoder.error(error)
        if not self._stream:
            await send_whole(send, 200, json_bytes(self._encoder.cancelled()), [])
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": frames, "more_body": False})
