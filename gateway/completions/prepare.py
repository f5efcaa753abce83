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
from gateway.completions.schema import CompletionRequest
from gateway.generation_request import GenerationRequest
from gateway.openai_errors import context_length_exceeded
from gateway.parsing.parser import PlainParser
from gateway.request_record import RequestRecord
from gateway.state import GatewayState
from gateway.stop import StopMatcher
from gateway.text_input import check_total, input_paths, input_too_long, tokenize_inputs

CALL_TOKENS_MAX = 1_000_000
"""Of all prompts of a call; about what a body within its limit can hold."""


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
