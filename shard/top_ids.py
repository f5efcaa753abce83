"""The likeliest of many tokens, in an order that does not depend on how they are found.

Shapes: V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def top_ids(values_V: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:  # noqa: N803 - shape suffix
    """The ids of the `count` highest values, highest first; of equals the lowest id first.

    Only what may be among them is sorted. Gives all V ids where there are no more; no value may be NaN.
    """
    size = values_V.shape[0]
    if count == 0:
        return np.empty(0, np.intp)
    if count >= size:
        return np.argsort(-values_V, kind="stable")
    lowest = np.partition(values_V, size - count)[size - count]
    candidates = np.flatnonzero(values_V >= lowest)
    return candidates[np.argsort(-values_V[candidates], kind="stable")[:count]]
