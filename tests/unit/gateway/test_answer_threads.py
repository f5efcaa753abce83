"""Large parts of answers are encoded in threads, as long as somebody waits for them."""

from __future__ import annotations

import threading

import pytest

from gateway.answer import Answer
from gateway.answer_threads import INLINE_TOKENS_MAX, WantedAnswers, encode
from gateway.detokenizer import ByteDetokenizer
from gateway.parsing.parser import PlainParser
from gateway.request_record import ClientLeft
from gateway.stop import StopMatcher


def thread_name() -> bytes:
    """Where this is called."""
    return threading.current_thread().name.encode() + b" "


@pytest.mark.parametrize(
    ("tokens", "expected"), [(INLINE_TOKENS_MAX, threading.main_thread().name), (INLINE_TOKENS_MAX + 1, "answer")]
)
async def test_large_parts_are_made_in_a_thread(tokens: int, expected: str):
    """In their order; small ones at once."""
    data = await encode([thread_name, lambda: b"then"], tokens=tokens, gone=threading.Event())
    name, then = data.decode().split()
    assert name.startswith(expected)
    assert then == "then"


async def test_no_part_is_begun_for_a_caller_who_has_gone():
    """Not even one that had its turn to wait for."""
    gone = threading.Event()
    made: list[int] = []

    def leave() -> bytes:
        made.append(1)
        gone.set()
        return b""

    with pytest.raises(ClientLeft):
        await encode([leave, leave], tokens=INLINE_TOKENS_MAX + 1, gone=gone)
    assert made == [1]


async def test_what_a_part_raises_comes_through():
    """As on the event loop."""

    def fail() -> bytes:
        raise ValueError("no bytes")

    with pytest.raises(ValueError, match="no bytes"):
        await encode([fail], tokens=INLINE_TOKENS_MAX + 1, gone=threading.Event())


def test_answers_are_read_as_long_as_they_are_wanted():
    """Like any sequence; then encoding ends at the next one."""
    detokenizer = ByteDetokenizer(lambda token_id: bytes([token_id]))
    answers = [Answer(detokenizer, PlainParser(), StopMatcher(()), eos_ids={0}, max_tokens=1) for _ in range(3)]
    gone = threading.Event()
    wanted = WantedAnswers(answers, gone)
    assert (len(wanted), wanted[1], wanted[1:], list(wanted)) == (3, answers[1], answers[1:], answers)
    reading = iter(wanted)
    next(reading)
    gone.set()
    with pytest.raises(ClientLeft):
        next(reading)
