"""What becomes of a pooled hidden state on its way to a caller. Pure."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Literal

from shared.errors import MeshError

EncodingFormat = Literal["float", "base64"]


def finished_vector(hidden: Sequence[float], *, normalize: bool) -> array[float]:
    """A pooled hidden state as float32, of length 1 if it is to be.

    Raises:
        MeshError: `not_finite`: the model's numbers overflowed.
    """
    length = math.hypot(*hidden) if normalize else 1.0
    if not math.isfinite(length) or not all(map(math.isfinite, hidden)):
        raise MeshError("not_finite", "the model's hidden states are no finite numbers")
    scale = 1.0 / length if length else 1.0
    return array("f", [value * scale for value in hidden])


def encode_vector(vector: array[float], encoding_format: EncodingFormat) -> list[float] | str:
    """As the API writes it: numbers, or the base64 of little-endian float32."""
    if encoding_format == "float":
        return vector.tolist()
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
