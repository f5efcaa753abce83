"""Log-probabilities of the model's own logits, for people to read: before anything shifts or rules out.

Shapes: R = rows, each with the logits of one place; V = vocabulary; n = alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shard.top_ids import top_ids
from shared.errors import StepFailed

LOGPROB_MIN = -9999.0
"""What stands for anything less likely, the impossible included: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Rows as a result carries them: column 0 is the token itself, then the likeliest, best first.

    Attributes:
        values: ``f32 [R, 1 + n]``.
        ids: ``i32 [R, 1 + n]``.
    """

    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]


def log_probs(
    logits_RV: npt.NDArray[np.float32],  # noqa: N803 - shape suffix
    tokens_R: npt.NDArray[np.integer],  # noqa: N803
    count: int,
) -> LogProbs:
    """Each row's token and the `count` likeliest (all V where there are no more), equals by id.

    The logarithm of the softmax is computed in float64, a row at a time.

    Raises:
        StepFailed: `non_finite_logits` when a row has NaN or +inf, or nothing but -inf.
    """
    rows, vocab_size = logits_RV.shape
    columns = 1 + min(count, vocab_size)
    values, ids = np.empty((rows, columns), np.float32), np.empty((rows, columns), np.int32)
    for i in range(rows):
        _check_finite(logits_RV[i])
        ids[i, 0] = tokens_R[i]
        ids[i, 1:] = top_ids(logits_RV[i], columns - 1)
        values[i] = np.maximum(_log_softmax_at(logits_RV[i], ids[i]), LOGPROB_MIN)
    return LogProbs(values, ids)


def join(parts: list[LogProbs]) -> LogProbs:
    """Rows of several slices, in order; at least one."""
    return LogProbs(np.concatenate([part.values for part in parts]), np.concatenate([part.ids for part in parts]))


def _check_finite(logits_V: npt.NDArray[np.float32]) -> None:  # noqa: N803
    highest = float(logits_V.max())  # NaN wins every maximum
    if not np.isfinite(highest):
        raise StepFailed("non_finite_logits", f"the highest logit is {highest}")


def _log_softmax_at(logits_V: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:  # noqa: N803
    highest = float(logits_V.max())
    total = np.exp(logits_V.astype(np.float64) - highest).sum()
    result: npt.NDArray[np.float64] = logits_V[ids].astype(np.float64) - highest - np.log(total)
    return result
