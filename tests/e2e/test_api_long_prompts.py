"""A prompt of megabytes costs its sender time, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.tokenizer import load_tokenizer
from tests.support.api_server import ApiServer, running_api
from tests.support.text_tokenizers import CONTEXT_LEN, build_byte_level

BODY_BYTES_MAX = 8 << 20
PINGS_MIN = 10
"""Where the event loop is held while a prompt is read, one or two get through."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    return build_byte_level(tmp_path)


@pytest.fixture
def api(model: Path) -> Iterator[ApiServer]:
    """A server with a small window and the default limit on bodies."""
    with running_api(model, body_bytes_max=BODY_BYTES_MAX) as server:
        yield server


def prompt(text: str) -> list[dict[str, str]]:
    """One message."""
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 7}])
def test_a_prompt_that_cannot_fit_is_refused_by_its_size(api: ApiServer, limit: dict[str, int]):
    """With numbers that hold, in the words by which clients know the error."""
    response = api.chat(messages=prompt("mesh " * 800_000), **limit)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT_LEN} tokens.")
    assert "resulted in at least " in error["message"]
    assert not api.generator.requests


@pytest.mark.parametrize("start", ["", "<|im_end|>"])
def test_others_are_served_while_a_long_prompt_is_read(model: Path, start: str):
    """Control tokens in its text or not: the event loop is not held."""
    tokenizer = load_tokenizer(model, context_len=1_000_000)
    with running_api(model, tokenizer=tokenizer, body_bytes_max=BODY_BYTES_MAX) as api:
        statuses: list[int] = []

        def send() -> None:
            statuses.append(api.chat(messages=prompt(start + "a " * 1_500_000)).status_code)

        sender = threading.Thread(target=send)
        sender.start()
        pings = 0
        with httpx.Client(base_url=api.url, timeout=20) as other:
            while sender.is_alive():
                assert other.get("/healthz").status_code == 200
                pings += 1
                sender.join(0.02)
        assert statuses == [400]
        assert pings >= PINGS_MIN
