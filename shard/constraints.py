"""Which tokens may be drawn at all, as -inf in the logits of those that may not.

Shapes: V = vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.messages import SamplingParams


def rules_out(params: SamplingParams, answer_len: int) -> bool:
    """Whether a parameter rules tokens out at this place of the answer."""
    return bool(params.grammar or params.allowed_ids or params.banned_ids or answer_len < params.min_tokens)


def rule_out(
    logits_V: npt.NDArray[Any],  # noqa: N803 - shape suffix
    params: SamplingParams,
    answer_len: int,
    grammar_mask_V: npt.NDArray[np.bool_] | None,  # noqa: N803
) -> None:
    """Write -inf, in place, where a token may not be drawn.

    Args:
        logits_V: Every id that `params` names is below V.
        params: Its `grammar`, `allowed_ids`, `banned_ids`, `end_ids` and `min_tokens` count here.
        answer_len: Tokens of the answer so far.
        grammar_mask_V: True where the grammar allows the token; there is one where there is a grammar.
    """
    if grammar_mask_V is not None:
        np.copyto(logits_V, -math.inf, where=~grammar_mask_V)
    if params.allowed_ids:
        ids = list(params.allowed_ids)
        allowed = logits_V[ids]
        logits_V.fill(-math.inf)
        logits_V[ids] = allowed
    if params.banned_ids:
        logits_V[list(params.banned_ids)] = -math.inf
    if answer_len < params.min_tokens and params.end_ids:
        logits_V[list(params.end_ids)] = -math.inf
