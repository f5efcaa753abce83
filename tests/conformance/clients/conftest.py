"""Where the server is, and clients of it in their strictest mode."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI

WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"location": {"type": "string", "description": "City name"}},
    "required": ["location"],
    "additionalProperties": False,
}
HELLO = "Hello from the mesh \U0001f600."


@dataclass(frozen=True)
class Server:
    """What is tried: `tests.conformance` serves it and names it in the environment.

    Args:
        base_url: With the ``/v1``.
        model: The served model's name.
        reasoning_model: Another name of it, by which llm-comply takes it for one that reasons.
    """

    base_url: str
    model: str
    reasoning_model: str

    def openai(self, **options: Any) -> openai.OpenAI:
        """The SDK, validating strictly, without retries."""
        options = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True, **options}
        return openai.OpenAI(base_url=self.base_url, **options)

    def lax_openai(self) -> openai.OpenAI:
        """For the few answers in which OpenAI's own servers, too, give null or text where its SDK's types have none."""
        return self.openai(_strict_response_validation=False)

    def anthropic(self) -> anthropic.Anthropic:
        """Likewise."""
        root = self.base_url.removesuffix("/v1")
        return anthropic.Anthropic(base_url=root, api_key="none", max_retries=0, _strict_response_validation=True)

    def langchain(self, **options: Any) -> ChatOpenAI:
        """LangChain's chat model, without retries."""
        return ChatOpenAI(base_url=self.base_url, api_key="none", model=self.model, max_retries=0, **options)

    def litellm(self) -> dict[str, Any]:
        """What every LiteLLM call is given."""
        return {"model": f"openai/{self.model}", "api_base": self.base_url, "api_key": "none", "num_retries": 0}


@pytest.fixture(scope="session")
def server() -> Server:
    """The server under test."""
    model = os.environ["CONFORMANCE_MODEL"]
    return Server(os.environ["CONFORMANCE_BASE_URL"], model, os.environ.get("CONFORMANCE_REASONING_MODEL", model))


def user(content: str) -> list[dict[str, Any]]:
    """The messages of a first turn."""
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="session")
def weather_tool() -> dict[str, Any]:
    """A function tool as chat completions take it."""
    function = {"name": "get_weather", "description": "The weather now.", "parameters": WEATHER_PARAMETERS}
    return {"type": "function", "function": function}
