"""The loop that makes tokens.

A generation is `prefill` once, then `decode` until an end. Each is made of passes: `run_pass` leads some
positions through every hop in turn, the gateway relaying each hop's answer to the next, and
`gateway.recovery.serve` sees to it that a hop answers whatever happens to its node. So this loop knows
of two failures only: the last one, `GenerationFailed`, and `RouteLost`, after which the session begins again from its
token ids on nodes that hold other ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.errors import GenerationFailed
from gateway.generation_request import Token
from gateway.recovery import serve
from gateway.relay import Answered, Generation
from gateway.reroute import REROUTES_PER_PASS_MAX, RouteLost, reroute
from gateway.step_answer import Drawn

EncodeText = Callable[[str], Sequence[int]]
"""Token ids of a text in which special tokens are written out, with none added."""


async def prefill(generation: Generation, end: int) -> Answered:
    """Lead the first `end` positions through the route anew, in chunks; returns the last hop's last answer.

    Raises:
        GenerationFailed: A hop cannot be brought to answer.
    """
    session = generation.session
    session.restart()
    answered: Answered = None
    for chunk_end in session.chunk_ends(end):
        answered = await run_pass(generation, chunk_end)
    return answered


async def prime(generation: Generation) -> None:
    """Lead all positions but the last through the route, which draws nothing; a single one is left to the first draw.

    What follows may then be decoded from here several times over, each time from the last position of the prompt.

    Raises:
        GenerationFailed: A hop cannot be brought to answer.
    """
    shared_len = len(generation.session.ids) - 1
    if shared_len:
        await prefill(generation, shared_len)


async def run_pass(generation: Generation, end: int) -> Answered:
    """Lead positions ``[passed, end)`` through every hop; returns the last hop's answer.

    Where the route is lost and there is another one, everything from position 0 on is led over that instead.

    Raises:
        GenerationFailed: A hop cannot be brought to answer.
    """
    try:
        return await _lead(generation, end)
    except RouteLost as lost:
        failure = lost
    for _ in range(REROUTES_PER_PASS_MAX):
        reroute(generation, failure.index)
        try:
            answered: Answered = None
            for chunk_end in generation.session.chunk_ends(end):
                answered = await _lead(generation, chunk_end)
        except RouteLost as lost:
            failure = lost
        else:
            return answered
    message = f"the nodes were given other layers {REROUTES_PER_PASS_MAX} times without an answer in between"
    raise GenerationFailed("no_progress", message, reroutes=REROUTES_PER_PASS_MAX)


async def _lead(generation: Generation, end: int) -> Answered:
    """Lead positions ``[passed, end)`` through every hop of the route as it is.

    Raises:
        RouteLost: It cannot be used any more, and there is another one.
        GenerationFailed: A hop cannot be brought to answer.
    """
    answered: Answered = generation.session.begin_pass(end)
    for index in range(len(generation.session.hops)):
        assert not isinstance(answered, Drawn | None)  # noqa: S101 - only the last hop draws
        answered = await serve(generation, index, answered)
    generation.end_pass()
    return answered


async def draw(generation: Generation, encode_text: EncodeText) -> list[Token]:
    """The next token, with which the session continues: one, or several from an old tail's text.

    Raises:
        GenerationFailed: See `serve`; `bad_answer` for a text that holds no token.
    """
    session = generation.session
    is_new = session.reencodes or not session.passed
    answered = await (prefill if is_new else run_pass)(generation, len(session.ids))
    assert isinstance(answered, Drawn)  # noqa: S101 - the pass that ends with the last id samples
    if answered.token_id is not None:
        session.ids.append(answered.token_id)
        return [Token(answered.token_id, logprobs=answered.logprobs)]
    session.reencodes = True
    ids = list(encode_text(answered.text or ""))
    if not ids:
        raise GenerationFailed("bad_answer", "the last hop answered with a text that holds no token")
    session.ids.extend(ids)
    return [Token(token_id) for token_id in ids]
