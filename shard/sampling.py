"""Drawing a token: a pure function of the logits, the request's parameters, the tokens before and the position.

No state and no generator: the random number for a position comes from a hash of (seed, position), and
all arithmetic is float64 in a fixed order. So a session rebuilt on another node, device or number of
threads goes on with the same tokens. `docs/protocol.md` gives the arithmetic.

Shapes: V = vocabulary, N = positions so far, K = tokens that are left to draw from.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shard.constraints import rule_out, rules_out
from shard.penalties import shift, shifts
from shard.step_check import check_ranges
from shard.top_ids import top_ids
from shared.errors import StepFailed
from shared.messages import SamplingParams

_SEED_AND_POSITION = struct.Struct("<QQ")
_MANTISSA_BITS = 53


@dataclass(frozen=True, slots=True)
class Before:
    """What a draw depends on besides logits, parameters and position.

    Args:
        history: ``[N]``, the ids of all positions before the token to draw, prompt and answer; needed by what
            `SamplingParams.needs_history` names.
        grammar_mask: ``[V]``, true where the grammar allows the token; needed with a grammar.
    """

    history: npt.NDArray[np.int32]
    grammar_mask: npt.NDArray[np.bool_] | None = None


_NOTHING = Before(np.empty(0, np.int32))


def sample(logits_V: torch.Tensor, params: SamplingParams, position: int, before: Before = _NOTHING) -> int:  # noqa: N803 - shape suffix
    """Draw the token that goes to `position`.

    Args:
        logits_V: Unnormalized log-probabilities on any device, of any floating type; -inf rules a token out.
        params: Temperature 0 is greedy; of equal logits the lowest id wins. Every id it names is below V.
        position: Absolute position of the token to draw, which picks the random number.
        before: The tokens before it, where the parameters need them.

    Raises:
        StepFailed: `non_finite_logits` when a logit is NaN or +inf, or all are -inf; `no_token_allowed` when the
            parameters rule out every token; `bad_step` when a parameter is out of its range.
    """
    check_ranges(params)
    if logits_V.dim() != 1 or not logits_V.numel():
        raise ValueError(f"logits must have shape [V], got {list(logits_V.shape)}")
    logits = logits_V.detach().to("cpu", torch.float32 if params.temperature == 0 else torch.float64).numpy()
    highest = float(logits.max())  # NaN wins every maximum
    if not math.isfinite(highest):
        raise StepFailed("non_finite_logits", f"the highest logit is {highest}", position=position)
    if params.grammar and before.grammar_mask is None:
        raise ValueError("a draw within a grammar needs the grammar's mask")
    answer_len = max(0, before.history.size - params.prompt_len)
    if rules_out(params, answer_len) or shifts(params):
        logits = logits.copy()  # it may be the model's own tensor
        rule_out(logits, params, answer_len, before.grammar_mask)
        shift(logits, params, before.history)
        highest = float(logits.max())
        if highest == -math.inf:
            raise StepFailed("no_token_allowed", "the sampling parameters rule out every token", position=position)
    if params.temperature == 0:
        return int(logits.argmax())  # numpy's is the first of equals
    return _draw(logits, highest, params, uniform(params.seed, position))


def _draw(logits: npt.NDArray[np.float64], highest: float, params: SamplingParams, u: float) -> int:
    """Cut the tail (`min_p`, then `top_k`, then `top_p`) and let the random number choose."""
    ids_K: npt.NDArray[np.intp] | None = None  # noqa: N806 - shape suffix; None is all
    if 0 < params.top_k < logits.size:
        ids_K = np.sort(top_ids(logits, params.top_k))  # noqa: N806
        logits = logits[ids_K]
    weights = _weigh(logits, highest, params.temperature)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0.0  # whether before top_k or after: both keep the likeliest
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids_K, weights = kept if ids_K is None else ids_K[kept], weights[kept]  # noqa: N806
    index = _invert_cdf(weights, u)
    return index if ids_K is None else int(ids_K[index])


def _weigh(logits: npt.NDArray[np.float64], highest: float, temperature: float) -> npt.NDArray[np.float64]:
    """Probabilities but for a factor: the likeliest weighs 1. In one array: fresh memory costs more than arithmetic."""
    weights = np.subtract(logits, highest)
    with np.errstate(over="ignore", under="ignore"):
        np.divide(weights, temperature, out=weights)
        np.exp(weights, out=weights)
    return weights


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to a position of a request."""
    digest = hashlib.blake2b(_SEED_AND_POSITION.pack(seed, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS)


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
    """The fewest most likely tokens whose mass reaches `top_p`, in the order of their ids.

    Tokens below a V-th of the mass that may go have less than that mass together, so all of them go:
    only the few above have to be sorted.
    """
    total = float(np.cumsum(weights)[-1])
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / weights.size)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    mass = np.cumsum(weights[order])
    return np.sort(order[: int(np.searchsorted(mass, top_p * total)) + 1])


def _invert_cdf(weights: npt.NDArray[np.float64], u: float) -> int:
    cdf = np.cumsum(weights)
    index = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))  # u·total may round up to the total
