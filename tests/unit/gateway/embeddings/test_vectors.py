"""Pooled hidden states on their way out."""

from __future__ import annotations

import base64
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.embeddings.vectors import encode_vector, finished_vector
from shared.errors import MeshError

NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50)


@given(NUMBERS)
def test_a_normalized_vector_has_length_one_and_the_same_direction(hidden: list[float]):
    """Except the one that has no direction."""
    vector = finished_vector(hidden, normalize=True)
    length = math.hypot(*hidden)
    if length < 1e-30:
        return
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
    assert list(vector) == pytest.approx([value / length for value in hidden], abs=1e-6)


@given(NUMBERS)
def test_base64_is_little_endian_float32(hidden: list[float]):
    """The same numbers as in the other format."""
    vector = finished_vector(hidden, normalize=False)
    data = base64.b64decode(str(encode_vector(vector, "base64")))
    assert list(struct.unpack(f"<{len(hidden)}f", data)) == encode_vector(vector, "float") == hidden


def test_a_zero_vector_stays_zero():
    """Nothing is divided by zero."""
    assert list(finished_vector([0.0, 0.0], normalize=True)) == [0.0, 0.0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_json_does_not_have_are_an_error(value: float, normalize: bool):
    """Never an answer."""
    with pytest.raises(MeshError) as caught:
        finished_vector([1.0, value], normalize=normalize)
    assert caught.value.code == "not_finite"
