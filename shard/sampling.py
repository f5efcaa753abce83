"""Drawing a token: a pure function of the logits, the request's parameters and the position.

No state and no generator: the random number for a position comes from a hash of (seed, position), and
all arithmetic is float64 in a fixed order. So a session rebuilt on another node, device or number of
threads goes on with the same tokens.

Shapes: V = vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import numpy.typing as npt
import torch

from shared.errors import StepFailed
from shared.messages import SamplingParams

_SEED_AND_POSITION = struct.Struct("<QQ")
_MANTISSA_BITS = 53


def sample(logits_V: torch.Tensor, params: SamplingParams, position: int) -> int:  # noqa: N803 - shape suffix
    """Draw the token that goes to `position`.

    Args:
        logits_V: Unnormalized log-probabilities on any device, of any floating type; -inf rules a token out.
        params: Temperature 0 is greedy; of equal logits the lowest id wins.
        position: Absolute position of the token to draw, which picks the random number.

    Raises:
        StepFailed: `non_finite_logits` when a logit is NaN or +inf, or all are -inf;
            `bad_step` when a parameter is out of its range.
    """
    _check_params(params)
    if logits_V.dim() != 1 or not logits_V.numel():
        raise ValueError(f"logits must have shape [V], got {list(logits_V.shape)}")
    logits = logits_V.detach().to("cpu", torch.float32 if params.temperature == 0 else torch.float64).numpy()
    highest = float(logits.max())  # NaN wins every maximum
    if not math.isfinite(highest):
        raise StepFailed("non_finite_logits", f"the highest logit is {highest}", position=position)
    if params.temperature == 0:
        return int(logits.argmax())  # numpy's is the first of equals
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - highest) / params.temperature)
    if params.top_p < 1:
        weights = _keep_nucleus(weights, params.top_p)
    return _invert_cdf(weights, uniform(params.seed, position))


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to a position of a request."""
    digest = hashlib.blake2b(_SEED_AND_POSITION.pack(seed, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS)


def _keep_nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """Zero all but the fewest most likely tokens whose mass reaches `top_p`.

    Tokens below a V-th of the mass that may go have less than that mass together, so all of them go:
    only the few above have to be sorted.
    """
    total = float(np.cumsum(weights)[-1])
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / weights.size)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    mass = np.cumsum(weights[order])
    kept = order[: int(np.searchsorted(mass, top_p * total)) + 1]
    nucleus = np.zeros_like(weights)
    nucleus[kept] = weights[kept]
    return nucleus


def _invert_cdf(weights: npt.NDArray[np.float64], u: float) -> int:
    cdf = np.cumsum(weights)
    index = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))  # u·total may round up to the total


def _check_params(params: SamplingParams) -> None:
    if params.temperature < 0:
        raise StepFailed("bad_step", f"temperature must be at least 0, got {params.temperature}", field="temperature")
    if not 0 <= params.top_p <= 1:
        raise StepFailed("bad_step", f"top_p must be between 0 and 1, got {params.top_p}", field="top_p")
