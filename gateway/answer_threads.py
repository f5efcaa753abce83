"""Threads in which large parts of answers become bytes, so that no other call waits for them.

Encoding is Python's own work, so a thread does not make it faster; but the event loop gets its turns meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import overload

from gateway.answer import Answer
from gateway.request_record import ClientLeft

LARGE_ANSWERS_AT_ONCE = 2
"""Each takes turns with the event loop: more of them would make it wait longer, and finish no sooner."""
INLINE_TOKENS_MAX = 512
"""Up to so many tokens are encoded on the event loop: some 20 ms where each names 20 alternatives."""

Part = Callable[[], bytes]

_THREADS = ThreadPoolExecutor(LARGE_ANSWERS_AT_ONCE, thread_name_prefix="answer")


async def encode(parts: Iterable[Part], *, tokens: int, gone: threading.Event) -> bytes:
    """Make the parts of an answer in their order, in a thread if they are large, and join them.

    Args:
        parts: Each makes its bytes when it is called.
        tokens: About how many tokens they are of.
        gone: Set as soon as nobody waits for the answer any more: no further part is begun.

    Raises:
        ClientLeft: Nobody waits.
    """
    if tokens <= INLINE_TOKENS_MAX:
        return b"".join([part() for part in parts])
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _joined, parts, gone)


def _joined(parts: Iterable[Part], gone: threading.Event) -> bytes:
    made = []
    for part in parts:
        check_wanted(gone)
        made.append(part())
    return b"".join(made)


def check_wanted(gone: threading.Event) -> None:
    """Let work go on that somebody waits for.

    Raises:
        ClientLeft: Nobody does.
    """
    if gone.is_set():
        raise ClientLeft


class WantedAnswers(Sequence[Answer]):
    """Answers that can be read as long as somebody waits for them, so that encoding ends between two choices.

    Args:
        answers: One for each choice.
        gone: Set as soon as nobody waits; reading one then raises `ClientLeft`.
    """

    def __init__(self, answers: Sequence[Answer], gone: threading.Event) -> None:
        self._answers = answers
        self._gone = gone

    def __len__(self) -> int:
        """How many there are."""
        return len(self._answers)

    @overload
    def __getitem__(self, index: int) -> Answer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Answer]: ...

    def __getitem__(self, index: int | slice) -> Answer | Sequence[Answer]:
        """One answer, or several.

        Raises:
            ClientLeft: Nobody waits for them.
        """
        check_wanted(self._gone)
        return self._answers[index]
