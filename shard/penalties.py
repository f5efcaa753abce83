"""What shifts logits before a draw: biases, and penalties for tokens that have come before.

Shapes: V = vocabulary, N = positions so far, A = positions of the answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shared.messages import SamplingParams


def shifts(params: SamplingParams) -> bool:
    """Whether a parameter shifts logits."""
    return bool(
        params.logit_bias or params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    )


def shift(logits_V: npt.NDArray[Any], params: SamplingParams, history_N: npt.NDArray[np.int32]) -> None:  # noqa: N803
    """Apply bias, repetition penalty, then frequency and presence penalties, in place and in this order.

    Args:
        logits_V: Every id of `params` and of the history is below V; -inf stays -inf.
        params: Its `logit_bias` and the three penalties count here, and `prompt_len`.
        history_N: Prompt and answer so far.
    """
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        np.add.at(logits_V, list(ids), np.asarray(biases, logits_V.dtype))  # an id given twice counts twice
    if params.repetition_penalty != 1:
        _discourage_repetition(logits_V, params.repetition_penalty, history_N)
    answer_A = history_N[params.prompt_len :]  # noqa: N806 - shape suffix
    if answer_A.size and (params.frequency_penalty or params.presence_penalty):
        seen, counts = np.unique(answer_A, return_counts=True)
        logits_V[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _discourage_repetition(logits_V: npt.NDArray[Any], penalty: float, history_N: npt.NDArray[np.int32]) -> None:  # noqa: N803
    """A token that comes several times is written several times with the same value, so none is counted twice."""
    before = logits_V[history_N]
    logits_V[history_N] = np.where(before > 0, before / penalty, before * penalty)
