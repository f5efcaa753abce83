"""Who sends a request, reads what comes, and knows what should have come."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from itertools import cycle

from gateway.choice import ChoiceStream
from gateway.generation import Generator
from gateway.generation_request import GenerationRequest, Token
from shared.clock import Clock
from tests.simulation.schedule import Call
from tests.support.fake_model import expected_embedding, expected_scores
from tests.support.memory_mesh import NUM_LAYERS, expected_tokens_of


async def make(call: Call, generator: Generator, clock: Clock) -> str:
    """Send the request and read to the end, or until the caller has had enough; returns which of the two it was.

    Raises:
        MeshError: The gateway said that it cannot.
    """
    if call.kind == "embed":
        vector = await generator.embed(call.prompt_ids, call.pooling, "r")
        assert list(vector) == list(
            array("f", expected_embedding(call.prompt_ids, call.pooling, num_layers=NUM_LAYERS))
        ), "the embedding is wrong"
        return "complete"
    request = GenerationRequest(
        prompt_ids=call.prompt_ids,
        max_tokens=call.max_tokens,
        choices=call.choices,
        eos_ids=frozenset(),
        request_id="r",
        prompt_logprobs=call.prompt_logprobs,
        priority=call.priority,
    )
    async with generator.generation(request) as stream:
        return await _read(call, stream, clock)


async def _read(call: Call, stream: ChoiceStream, clock: Clock) -> str:
    reading = Reading(call, [[] for _ in call.choices])
    pauses = cycle(call.pauses)
    is_whole = False
    try:
        async for token in stream:
            if not reading.take(stream, token):
                return "left"
            await clock.sleep(next(pauses))
        is_whole = True
        return "complete"
    finally:
        reading.check(stream, is_whole=is_whole)


@dataclass
class Reading:
    """What came so far.

    Args:
        call: What was asked.
        tokens: Of each choice.
        order: Of which choice each token was.
    """

    call: Call
    tokens: list[list[Token]]
    order: list[int] = field(default_factory=list)

    def take(self, stream: ChoiceStream, token: Token) -> bool:
        """Take in a token; returns whether to go on."""
        self.order.append(token.choice)
        tokens = self.tokens[token.choice]
        tokens.append(replace(token, choice=0))
        assert len(tokens) <= self.call.finish_after[token.choice], "a finished choice went on"
        if len(tokens) == self.call.finish_after[token.choice]:
            stream.finish(token.choice)
        return len(self.order) != self.call.leave_after

    def check(self, stream: ChoiceStream, *, is_whole: bool) -> None:
        """Each choice is what it would be alone, first tokens came in order, and the prompt is scored."""
        call = self.call
        for sampling, tokens, last in zip(call.choices, self.tokens, call.finish_after, strict=True):
            length = min(call.max_tokens, last) if is_whole else len(tokens)
            expected = expected_tokens_of(length, prompt_ids=call.prompt_ids, sampling=sampling)
            assert tokens == expected, f"wrong tokens: {tokens} instead of {expected}"
        begun = sorted(set(self.order))
        firsts = [self.order.index(choice) for choice in begun]
        assert firsts == sorted(firsts), "choices began out of order"
        assert begun == list(range(len(begun))), "a choice began before one before it"
        if call.prompt_logprobs is not None and (is_whole or self.order):
            scores = expected_scores(call.prompt_ids, call.prompt_logprobs, num_layers=NUM_LAYERS)
            assert stream.prompt_scores.tokens == scores, "the prompt's scores are wrong"
