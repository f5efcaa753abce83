"""The loop that makes tokens.

A generation is `prefill` once, then `decode` until an end. Each is made of passes: `run_pass` leads some
positions through every hop in turn, the gateway relaying each hop's answer to the next, and
`gateway.recovery.serve` sees to it that a hop answers whatever happens to its node. So this loop knows
of no failure but the last one, `GenerationFailed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.errors import GenerationFailed
from gateway.recovery import serve
from gateway.relay import Answered, Drawn, Generation

EncodeText = Callable[[str], Sequence[int]]
"""Token ids of a text in which special tokens are written out, with none added."""


async def prefill(generation: Generation) -> Drawn:
    """Lead everything through the route anew, in chunks; returns what comes after it."""
    session = generation.session
    session.restart()
    answered: Answered = None
    for end in session.chunk_ends():
        answered = await run_pass(generation, end)
    return _drawn(answered)


async def decode(generation: Generation) -> Drawn:
    """Lead the newest positions through the route; returns what comes after them."""
    return _drawn(await run_pass(generation, len(generation.session.ids)))


async def run_pass(generation: Generation, end: int) -> Answered:
    """Lead positions ``[passed, end)`` through every hop; returns the last hop's answer.

    Raises:
        GenerationFailed: A hop cannot be brought to answer.
    """
    answered: Answered = generation.session.begin_pass(end)
    for index in range(len(generation.session.hops)):
        assert not isinstance(answered, Drawn | None)  # noqa: S101 - only the last hop draws
        answered = await serve(generation, index, answered)
    generation.end_pass()
    return answered


async def next_ids(generation: Generation, encode_text: EncodeText) -> list[int]:
    """The next token, as the ids by which the session continues: one, or several from an old tail's text.

    Raises:
        GenerationFailed: See `serve`; `bad_answer` for a text that holds no token.
    """
    session = generation.session
    is_new = session.reencodes or not session.passed
    drawn = await (prefill(generation) if is_new else decode(generation))
    if drawn.token_id is not None:
        ids = [drawn.token_id]
    else:
        session.reencodes = True
        ids = list(encode_text(drawn.text or ""))
    if not ids:
        raise GenerationFailed("bad_answer", "the last hop answered with a text that holds no token")
    session.ids.extend(ids)
    return ids


def _drawn(answered: Answered) -> Drawn:
    assert isinstance(answered, Drawn)  # noqa: S101 - the last pass of a prefill, and each decode, samples
    return answered
