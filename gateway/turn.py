"""A chat request made ready: its prompt, its generation, and fresh answers to write.

Every dialect of the API comes through here, after its body has been read into a `ChatRequest`. All that can be
refused is refused here, before anything is generated or sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from gateway.answer import Answer
from gateway.answer_encoder import AnswerEncoder
from gateway.answer_grammar import answer_grammar
from gateway.answer_response import AnswerResponse
from gateway.answer_shape import answer_parser, answer_shape, call_id_minter
from gateway.chat_request import AnswerAsked, ChatRequest
from gateway.generation_request import GenerationRequest
from gateway.openai_errors import context_length_exceeded, invalid_value, unsupported
from gateway.request_record import RequestRecord
from gateway.state import GatewayState
from gateway.stop import StopMatcher
from gateway.tokenizer import INLINE_CHARS_MAX, ChatTokenizer, Prompt, PromptTooLong
from gateway.turn_sampling import check_vocabulary, choice_seeds, end_ids, sampling_params, wire_seed


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
        ApiError: 400 for a prompt that does not fit or that the template does not take, or for what this model
            cannot do; 429.
    """
    tokenizer = gateway.tokenizer
    check_vocabulary(chat.sampling, tokenizer.ids_end)
    prompt = await tokenize(chat, tokenizer, size=size)
    max_tokens = fit_answer(chat.answer, prompt_tokens=len(prompt.ids), context_len=tokenizer.context_len)
    grammar = await compile_grammar(chat, tokenizer, prompt.tail, size=size)
    ends = end_ids(chat.sampling, tokenizer.eos_ids)
    if chat.sampling.min_tokens > max_tokens:
        raise invalid_value("min_tokens", f"the context has room for {max_tokens} tokens of an answer")
    first = sampling_params(
        chat.sampling,
        defaults=tokenizer.sampling_defaults,
        seed=gateway.random_seed() if chat.sampling.seed is None else wire_seed(chat.sampling.seed),
        prompt_len=len(prompt.ids),
        end_ids=ends,
        grammar=grammar,
        logprobs=chat.answer.logprobs,
    )
    generation = GenerationRequest(
        prompt_ids=prompt.ids,
        choices=tuple(replace(first, seed=seed) for seed in choice_seeds(first.seed, chat.answer.n)),
        max_tokens=max_tokens,
        eos_ids=ends,
        request_id=request_id,
        priority=chat.priority,
    )
    answers = [_create_answer(chat, tokenizer, prompt, generation) for _ in generation.choices]
    return Turn(generation=generation, answers=answers, stream=chat.stream)


def _create_answer(
    chat: ChatRequest, tokenizer: ChatTokenizer, prompt: Prompt, generation: GenerationRequest
) -> Answer:
    parser = answer_parser(tokenizer.families, chat.tools, prompt.tail, tokenizer.own_parser)
    return Answer(
        tokenizer.detokenizer(prompt.ids, parser.special_tokens if chat.answer.skip_special_tokens else None),
        parser,
        StopMatcher(chat.answer.stop, shown=chat.answer.include_stop),
        eos_ids=generation.eos_ids,
        max_tokens=generation.max_tokens,
        min_tokens=chat.sampling.min_tokens,
        stop_ids=chat.sampling.stop_token_ids,
        calls_max=None if chat.tools.parallel else 1,
        names_calls=not chat.tools.is_named,
        mint_id=call_id_minter(tokenizer.families),
        spell=None if chat.answer.logprobs is None else tokenizer.spell,
    )


async def tokenize(chat: ChatRequest, tokenizer: ChatTokenizer, *, size: int) -> Prompt:
    """The prompt's ids, and the end of its text. Tools that may not be called are not shown to the model.

    Raises:
        ApiError: 400 `context_length_exceeded` when the prompt's size alone tells that it does not fit, or what
            the template does not take; 429.
    """
    asked = chat.template
    if asked.effort is not None:
        asked = replace(asked, kwargs={**tokenizer.template.effort_variables(asked.effort), **asked.kwargs})
    tools = () if chat.tools.mode == "none" else tuple(tool.definition for tool in chat.tools.tools)
    try:
        return await tokenizer.prompt(chat.messages, asked, tools, size=size)
    except PromptTooLong as error:
        raise context_length_exceeded(
            context_len=tokenizer.context_len,
            prompt_tokens=error.tokens_min,
            max_tokens=chat.answer.tokens_that_must_fit,
            param=chat.answer.max_tokens_param,
            at_least=True,
        ) from error


async def compile_grammar(chat: ChatRequest, tokenizer: ChatTokenizer, prompt_tail: str, *, size: int) -> str:
    """What each answer must match; empty where that is anything.

    Raises:
        ApiError: 400 that names what cannot be enforced; 429.
    """
    shape = answer_shape(tokenizer.families, tokenizer.added_id, prompt_tail)
    work = partial(answer_grammar, chat.format, chat.tools, shape)
    may_take_long = chat.format.kind != "text" or bool(chat.tools.tools)  # a small grammar can be a hard one
    grammar = await tokenizer.run_long(work, size=INLINE_CHARS_MAX + 1 if may_take_long else size)
    if grammar and chat.sampling.ignore_eos:
        raise unsupported("ignore_eos", "a constrained answer ends where its grammar does")
    return grammar


def fit_answer(asked: AnswerAsked, *, prompt_tokens: int, context_len: int) -> int:
    """How many tokens the answer may have: what was asked for, or the rest of the window.

    What is only a bound is lowered to that rest.

    Raises:
        ApiError: 400 `context_length_exceeded` when prompt and answer do not fit together.
    """
    room, must_fit = context_len - prompt_tokens, asked.tokens_that_must_fit
    if room < (1 if must_fit is None else must_fit):
        raise context_length_exceeded(
            context_len=context_len,
            prompt_tokens=prompt_tokens,
            max_tokens=must_fit,
            param=asked.max_tokens_param,
        )
    return room if asked.max_tokens is None else min(room, asked.max_tokens)
