"""What one model's forward calls its arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from transformers.modeling_utils import PreTrainedModel


@dataclass(frozen=True, slots=True)
class CallNames:
    """What this model's forward calls its arguments; None where it takes no such thing.

    transformers renamed `past_key_values` to `cache`, and models differ in what they accept.
    """

    cache: str | None
    position_ids: str | None
    cache_position: str | None
    use_cache: str | None
    logits_to_keep: str | None

    @classmethod
    def of(cls, model_class: type[PreTrainedModel]) -> CallNames:
        """Read them from the forward's signature."""
        names = inspect.signature(model_class.forward).parameters

        def first_of(*candidates: str) -> str | None:
            return next((name for name in candidates if name in names), None)

        return cls(
            cache=first_of("cache", "past_key_values", "cache_params"),
            position_ids=first_of("position_ids"),
            cache_position=first_of("cache_position"),
            use_cache=first_of("use_cache"),
            logits_to_keep=first_of("logits_to_keep", "num_logits_to_keep"),
        )
