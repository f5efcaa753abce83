"""How the choices of a completion's prompts are drawn: as those of a chat are, whatever the prompt's length."""

from __future__ import annotations

from dataclasses import replace

from gateway.chat_request import SamplingAsked
from gateway.state import GatewayState
from gateway.turn_sampling import check_vocabulary, choice_seeds, end_ids, sampling_params, wire_seed
from shared.messages import SamplingParams


def choice_params(
    asked: SamplingAsked, gateway: GatewayState, *, choices: int, logprobs: int | None
) -> list[SamplingParams]:
    """What the last hop draws each choice with; they differ in their seeds alone.

    Only what a caller asks for differs from its default: nodes of an older version can serve all other calls.

    Raises:
        ApiError: 400 for an id that is no token of this model.
    """
    tokenizer = gateway.tokenizer
    check_vocabulary(asked, tokenizer.ids_end)
    params = sampling_params(
        asked,
        defaults=tokenizer.sampling_defaults,
        seed=gateway.random_seed() if asked.seed is None else wire_seed(asked.seed),
        prompt_len=0,
        end_ids=end_ids(asked, tokenizer.eos_ids),
        logprobs=logprobs,
    )
    return [replace(params, seed=seed) for seed in choice_seeds(params.seed, choices)]


def for_prompt(params: SamplingParams, prompt_tokens: int) -> SamplingParams:
    """The same with the length of the prompt, where the answer's own tokens count."""
    counts_answer = params.min_tokens or params.frequency_penalty or params.presence_penalty
    return replace(params, prompt_len=prompt_tokens) if counts_answer else params
