"""What the gateway core is asked to generate, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One call's generations: the same prompt, continued once for each choice.

    Args:
        prompt_ids: At least one id; checked against the context length by the caller.
        choices: How each choice is drawn, at least one; `seed` is always set. They differ in nothing else.
        max_tokens: Of each choice. 0 only where the prompt is scored and nothing is to follow.
        eos_ids: Any of these ends a choice.
        request_id: For logs.
        prompt_logprobs: Score the prompt's tokens, with so many alternatives each; None does not.
        priority: Lower values are admitted before higher ones; equal ones in the order in which they came.

    Raises:
        ValueError: If there is no prompt, no choice, or nothing to do.
    """

    prompt_ids: tuple[int, ...]
    choices: tuple[SamplingParams, ...]
    max_tokens: int
    eos_ids: frozenset[int]
    request_id: str
    prompt_logprobs: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.choices:
            raise ValueError("a generation needs a prompt and at least one choice")
        if self.max_tokens < 0 or (not self.max_tokens and self.prompt_logprobs is None):
            raise ValueError("a generation needs at least one token to generate")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one place, of the model's own logits.

    Args:
        logprob: Of the token that stands there.
        top: The likeliest tokens with theirs, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Args:
        id: Its id.
        choice: Of which choice.
        logprobs: Where they were asked for.
    """

    id: int
    choice: int = 0
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class PromptScores:
    """The scored prompt.

    Args:
        tokens: For each of the prompt's tokens; None for the first, which nothing predicts.
    """

    tokens: list[TokenLogprobs | None] = field(default_factory=list)
