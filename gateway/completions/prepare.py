"""A completion call made ready: its prompts, their generations, and fresh answers to write.

All that can be refused is refused here, before anything is generated or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.answer import Answer
from gateway.answer_response import AnswerResponse
from gateway.chat_encoder import CompletionIdentity
from gateway.completions.echo import Prompt, echoed_prompt
from gateway.completions.encoder import CompletionEncoder, CompletionOptions
from gateway.completions.prompt_streams import PromptStreams
from gateway.completions.sampling import choice_params, for_prompt
from gateway.completions.schema import CompletionRequest
from gateway.generation_request import GenerationRequest
from gateway.openai_errors import context_length_exceeded, invalid_value
from gateway.parsing.parser import PlainParser
from gateway.request_record import RequestRecord
from gateway.state import GatewayState
from gateway.stop import StopMatcher
from gateway.text_input import check_total, input_paths, input_too_long, tokenize_inputs
from gateway.turn_sampling import end_ids

CALL_TOKENS_MAX = 2**17
"""Of all prompts of a call, or as many as the context has: all are held at once, with an echo more than once."""
CALL_LOGPROBS_MAX = 500_000
"""Of a whole call, alternatives included: each takes some 200 bytes of memory, 30 of the response, and 2 µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCompletion:
    """A call that will be served unless the mesh fails.

    Args:
        asked: The call.
        prompts: In its order.
        generations: One for each prompt; none where nothing is to be generated or scored.
        answers: Fresh, `best_of` for each prompt.
    """

    asked: CompletionRequest
    prompts: tuple[Prompt, ...]
    generations: list[GenerationRequest]
    answers: list[Answer]

    def respond(self, identity: CompletionIdentity, gateway: GatewayState, record: RequestRecord) -> AnswerResponse:
        """The response that generates and writes the choices; once only."""
        streams = PromptStreams(gateway.generator, self.generations)
        options = self._options()
        encoder = CompletionEncoder(
            identity,
            options,
            scores=streams.scores,
            detokenizer=gateway.tokenizer.detokenizer,
            spell=gateway.tokenizer.spell,
        )
        return AnswerResponse(
            streams.running,
            self.answers,
            encoder,
            prompt_tokens=options.prompt_tokens,
            stream=self.asked.stream,
            limits=gateway.stream_limits,
            record=record,
            clock=gateway.clock,
        )

    def _options(self) -> CompletionOptions:
        asked = self.asked
        return CompletionOptions(
            prompts=self.prompts,
            n=asked.answer.n,
            best_of=asked.best_of,
            echo=asked.echo,
            logprobs=asked.answer.logprobs is not None,
            token_ids=asked.answer.token_ids,
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
        )


async def prepare_completion(asked: CompletionRequest, gateway: GatewayState, *, request_id: str) -> PreparedCompletion:
    """Make a call ready.

    Args:
        asked: The call.
        gateway: The served model.
        request_id: For logs.

    Raises:
        ApiError: 400 for prompts that do not fit or are none, and for parameters that do not suit the model; 429.
    """
    ids = await _prompt_ids(asked, gateway)
    generations = _generations(asked, ids, gateway, request_id)
    answers = [_fresh_answer(asked, one, gateway) for one in ids for _ in range(asked.best_of)]
    prompts = await _prompts(asked, ids, gateway)
    return PreparedCompletion(asked=asked, prompts=prompts, generations=generations, answers=answers)


async def _prompt_ids(asked: CompletionRequest, gateway: GatewayState) -> list[tuple[int, ...]]:
    """Prompts that fit, each with its answer.

    Raises:
        ApiError: 400, 429.
    """
    tokenizer = gateway.tokenizer
    special = asked.add_special_tokens
    ids = await tokenize_inputs(asked.prompts, tokenizer, "prompt", add_special_tokens=special)
    for one, path in zip(ids, input_paths(asked.prompts, "prompt"), strict=True):
        _check_fits(len(one), asked.answer.max_tokens or 0, tokenizer.context_len, path)
    check_total(ids, "prompt", tokens_max=max(CALL_TOKENS_MAX, tokenizer.context_len))
    _check_logprobs(asked, sum(map(len, ids)))
    return ids


def _check_fits(prompt_tokens: int, max_tokens: int, context_len: int, path: str) -> None:
    if prompt_tokens + max_tokens <= context_len:
        return
    if not max_tokens:
        raise input_too_long(prompt_tokens, context_len, path)
    raise context_length_exceeded(
        context_len=context_len,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        param="max_tokens",
        source=path,
    )


async def _prompts(
    asked: CompletionRequest, ids: Sequence[tuple[int, ...]], gateway: GatewayState
) -> tuple[Prompt, ...]:
    """With what an echo shows; a long one takes as long as tokenizing does.

    Raises:
        ApiError: 429.
    """
    if not asked.echo:
        return tuple(map(Prompt, ids))
    with_offsets = asked.answer.logprobs is not None

    def echo_all() -> tuple[Prompt, ...]:
        return tuple(echoed_prompt(one, gateway.tokenizer, with_offsets=with_offsets) for one in ids)

    return await gateway.tokenizer.run_long(echo_all, size=sum(map(len, ids)))


def _check_logprobs(asked: CompletionRequest, prompt_tokens: int) -> None:
    """Let a call pass whose log-probabilities are not too many.

    Raises:
        ApiError: 400.
    """
    if asked.answer.logprobs is None:
        return
    generated = len(asked.prompts) * (asked.answer.max_tokens or 0)
    tokens = (generated + (prompt_tokens if asked.echo else 0)) * asked.best_of
    total = tokens * (asked.answer.logprobs + 1)
    if total > CALL_LOGPROBS_MAX:
        got = f"{total} of {tokens} tokens with {asked.answer.logprobs} alternatives each"
        raise invalid_value("logprobs", f"at most {CALL_LOGPROBS_MAX} log-probabilities in one call, got {got}")


def _generations(
    asked: CompletionRequest, ids: Sequence[tuple[int, ...]], gateway: GatewayState, request_id: str
) -> list[GenerationRequest]:
    """One for each prompt, or none where nothing is to be generated or scored."""
    scored = asked.answer.logprobs if asked.echo else None
    logprobs = asked.answer.logprobs
    if logprobs is None and asked.best_of > asked.answer.n:
        logprobs = 0  # the best of several can only be told by their log-probabilities
    params = choice_params(asked.sampling, gateway, choices=asked.best_of, logprobs=logprobs)
    max_tokens = asked.answer.max_tokens or 0
    if not max_tokens and scored is None:
        return []
    return [
        GenerationRequest(
            prompt_ids=one,
            choices=tuple(for_prompt(choice, len(one)) for choice in params),
            max_tokens=max_tokens,
            eos_ids=end_ids(asked.sampling, gateway.tokenizer.eos_ids),
            request_id=request_id,
            prompt_logprobs=scored,
            priority=asked.priority,
        )
        for one in ids
    ]


def _fresh_answer(asked: CompletionRequest, ids: Sequence[int], gateway: GatewayState) -> Answer:
    return Answer(
        gateway.tokenizer.detokenizer(ids),
        PlainParser(),
        StopMatcher(asked.answer.stop),
        eos_ids=end_ids(asked.sampling, gateway.tokenizer.eos_ids),
        max_tokens=asked.answer.max_tokens or 0,
        min_tokens=asked.sampling.min_tokens,
        stop_ids=asked.sampling.stop_token_ids,
        spell=gateway.tokenizer.spell,
    )
