"""Calls to a scripted mesh, each answer checked against everything that clients depend on."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from openai.types.chat import ChatCompletion

from tests.support.scripted_mesh import RunningMesh, running_scripted_mesh
from tests.support.stream_validator import ValidStream, validate_stream

CHAT = "/v1/chat/completions"
MODEL = "scripted"
Rule = dict[str, Any]


def rule(prompt: str, *answers: str | dict[str, Any], **more: Any) -> Rule:
    """How a prompt with these words is answered."""
    return {"match": {"contains": prompt}, "answers": list(answers), **more}


def fault(kind: str, at: int, **more: Any) -> dict[str, Any]:
    """What goes wrong at this token of an answer."""
    return {"kind": kind, "at": at, **more}


@dataclass(frozen=True)
class Both:
    """One answer, whole and streamed; made by `Caller.both`, which has compared them.

    Args:
        whole: The completion.
        stream: What its stream said.
    """

    whole: dict[str, Any]
    stream: ValidStream

    @property
    def text(self) -> str | None:
        """The first choice's."""
        return self.whole["choices"][0]["message"]["content"]

    @property
    def finish_reason(self) -> str:
        """The first choice's."""
        return str(self.whole["choices"][0]["finish_reason"])


@dataclass(frozen=True)
class Caller:
    """Calls one mesh."""

    mesh: RunningMesh

    def body(self, prompt: str | list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
        """A chat body, from the only message's words or from all messages."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"model": MODEL, "messages": messages, **parameters}

    def post(self, prompt: str | list[dict[str, Any]], **parameters: Any) -> httpx.Response:
        """A chat completion, whatever comes."""
        return self.mesh.http.post(CHAT, json=self.body(prompt, **parameters))

    def chat(self, prompt: str | list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
        """A whole answer, checked against OpenAI's own types."""
        response = self.post(prompt, **parameters)
        assert response.status_code == 200, response.text
        ChatCompletion.model_validate(response.json(), strict=True)
        return dict(response.json())

    def stream(self, prompt: str | list[dict[str, Any]], **parameters: Any) -> ValidStream:
        """A streamed answer, validated."""
        options = {"include_usage": True}
        response = self.post(prompt, stream=True, stream_options=options, **parameters)
        assert response.status_code == 200, response.text
        return validate_stream(response.content, include_usage=True)

    def both(self, prompt: str | list[dict[str, Any]], **parameters: Any) -> Both:
        """The same answer in both modes: text, reasoning, calls, reasons and usage must be equal."""
        parameters = {"seed": 0, **parameters}
        whole, stream = self.chat(prompt, **parameters), self.stream(prompt, **parameters)
        assert len(whole["choices"]) == len(stream.choices)
        for choice in whole["choices"]:
            _compare(choice, stream.choices[choice["index"]])
        assert stream.usage == whole["usage"]
        return Both(whole, stream)

    def error(self, prompt: str | list[dict[str, Any]], *, status: int = 400, **parameters: Any) -> dict[str, Any]:
        """The error that answers a call, with all of its keys."""
        return error_of(self.post(prompt, **parameters), status)

    def works(self) -> None:
        """A normal call is answered normally."""
        assert self.both("Are you there?").text == "Yes."

    def connect(self) -> socket.socket:
        """A connection in the caller's hands."""
        address = urlsplit(self.mesh.base_url)
        return socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    error = dict(response.json()["error"])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def _compare(choice: dict[str, Any], streamed: Any) -> None:
    message = choice["message"]
    assert (message["content"] or "") == streamed.text
    assert (message.get("reasoning_content") or "") == streamed.reasoning
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    assert calls == [(call.name, call.arguments) for call in streamed.calls]
    assert choice["finish_reason"] == streamed.finish_reason


@contextmanager
def calling(rules: Sequence[Rule], *, folder: Path | None = None, **script: Any) -> Iterator[Caller]:
    """A mesh of its own for these rules; the question of `Caller.works` is answered too.

    Args:
        rules: How prompts are answered.
        folder: A model folder, instead of the model that is made up.
        script: The script's other fields.
    """
    rules = [rule("Are you there?", "Yes."), *rules]
    with running_scripted_mesh({"version": 1, "rules": rules, **script}, model=folder) as mesh:
        yield Caller(mesh)
