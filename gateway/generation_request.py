"""What the gateway core is asked to generate."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation.

    Args:
        prompt_ids: At least one id; checked against the context length by the caller.
        sampling: `seed` is always set.
        max_tokens: At least 1.
        eos_ids: Any of these ends the answer.
        request_id: For logs.

    Raises:
        ValueError: If there is no prompt, or nothing to generate.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    eos_ids: frozenset[int]
    request_id: str

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_tokens < 1:
            raise ValueError("a generation needs a prompt and at least one token to generate")
