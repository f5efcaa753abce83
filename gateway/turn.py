"""A chat request made ready: its prompt, its generation, and fresh answers to write.

Every dialect of the API comes through here, after its body has been read into a `ChatRequest`. All that can be
refused is refused here, before anything is generated or sent.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gateway.answer import Answer
from gateway.answer_encoder import AnswerEncoder
from gateway.answer_response import AnswerResponse
from gateway.chat_request import AnswerAsked, ChatRequest, SamplingAsked
from gateway.generation_request import GenerationRequest
from gateway.openai_errors import context_length_exceeded
from gateway.parsing.parser import PlainParser
from gateway.request_record import RequestRecord
from gateway.state import SEED_BITS, GatewayState
from gateway.stop import StopMatcher
from gateway.tokenizer import ChatTokenizer, PromptTooLong
from shared.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Dividing logits by less overflows; the limit they tend to is the greedy choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request that will be served unless the mesh fails.

    Args:
        generation: What to generate.
        answers: Fresh, one for each choice.
        stream: Whether to stream.
    """

    generation: GenerationRequest
    answers: list[Answer]
    stream: bool

    def respond(self, encoder: AnswerEncoder, gateway: GatewayState, record: RequestRecord) -> AnswerResponse:
        """The response that generates and writes the answers; once only."""
        return AnswerResponse(
            lambda: gateway.generator.generation(self.generation),
            self.answers,
            encoder,
            prompt_tokens=len(self.generation.prompt_ids),
            stream=self.stream,
            limits=gateway.stream_limits,
            record=record,
            clock=gateway.clock,
        )


async def prepare_turn(chat: ChatRequest, gateway: GatewayState, *, size: int, request_id: str) -> Turn:
    """Make a request ready.

    Args:
        chat: What is asked.
        gateway: The served model.
        size: Bytes of the request's body.
        request_id: For logs.

    Raises:
        ApiError: 400 for a prompt that does not fit or that the template does not take; 429.
    """
    prompt_ids = await tokenize(chat, gateway.tokenizer, size=size)
    max_tokens = fit_answer(chat.answer, prompt_tokens=len(prompt_ids), context_len=gateway.tokenizer.context_len)
    eos_ids = gateway.tokenizer.eos_ids
    generation = GenerationRequest(
        prompt_ids=prompt_ids,
        choices=(sampling_params(chat.sampling, gateway),),
        max_tokens=max_tokens,
        eos_ids=eos_ids,
        request_id=request_id,
    )
    answer = Answer(
        gateway.tokenizer.detokenizer(prompt_ids),
        PlainParser(),
        StopMatcher(chat.answer.stop),
        eos_ids=eos_ids,
        max_tokens=max_tokens,
    )
    return Turn(generation=generation, answers=[answer], stream=chat.stream)


async def tokenize(chat: ChatRequest, tokenizer: ChatTokenizer, *, size: int) -> tuple[int, ...]:
    """The prompt's ids.

    Raises:
        ApiError: 400 `context_length_exceeded` when the prompt's size alone tells that it does not fit, or what
            the template does not take; 429.
    """
    try:
        return await tokenizer.prompt_ids(chat.messages, size=size)
    except PromptTooLong as error:
        raise context_length_exceeded(
            context_len=tokenizer.context_len,
            prompt_tokens=error.tokens_min,
            max_tokens=chat.answer.max_tokens,
            param=chat.answer.max_tokens_param,
            at_least=True,
        ) from error


def fit_answer(asked: AnswerAsked, *, prompt_tokens: int, context_len: int) -> int:
    """How many tokens the answer may have: what was asked for, or the rest of the window.

    Raises:
        ApiError: 400 `context_length_exceeded` when prompt and answer do not fit together.
    """
    room = context_len - prompt_tokens
    if room < (asked.max_tokens or 1):
        raise context_length_exceeded(
            context_len=context_len,
            prompt_tokens=prompt_tokens,
            max_tokens=asked.max_tokens,
            param=asked.max_tokens_param,
        )
    return asked.max_tokens or room


def sampling_params(asked: SamplingAsked, gateway: GatewayState) -> SamplingParams:
    """What the last hop samples with: the caller's values, else the model's defaults, else the API's."""
    defaults = gateway.tokenizer.sampling_defaults
    temperature = defaults.get("temperature", 1.0) if asked.temperature is None else asked.temperature
    top_p = defaults.get("top_p", 1.0) if asked.top_p is None else asked.top_p
    seed = gateway.random_seed() if asked.seed is None else wire_seed(asked.seed)
    return SamplingParams(temperature=0.0 if temperature < GREEDY_BELOW else temperature, top_p=top_p, seed=seed)


def wire_seed(seed: int) -> int:
    """A 64-bit seed as one that the wire carries: itself where it fits, else a hash of it."""
    if 0 <= seed < 2**SEED_BITS:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
