"""Wire tensors: bytes must fill the shape, and are kept flat."""

from __future__ import annotations

from array import array

import pytest

from shared.tensor_spec import ITEM_BYTES, WireTensor


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_bytes_must_fill_the_shape(dtype: str):
    """One byte more or less than the shape takes is refused."""
    size = ITEM_BYTES[dtype] * 6
    assert WireTensor(dtype, (2, 3), memoryview(bytes(size))).data.nbytes == size
    for wrong in (size - 1, size + 1):
        with pytest.raises(ValueError, match="takes"):
            WireTensor(dtype, (2, 3), memoryview(bytes(wrong)))


def test_an_unknown_element_type_is_refused():
    """Only what both sides can name travels."""
    with pytest.raises(ValueError, match="unknown element type"):
        WireTensor("f8", (1,), memoryview(b"\0"))


def test_views_of_any_format_are_kept_as_bytes():
    """A view of floats is the same memory seen as bytes, so that its length is its size on the wire."""
    floats = array("f", [1.0, 2.0])
    tensor = WireTensor("f32", (2,), memoryview(floats))
    assert len(tensor.data) == 8
    assert tensor.data.obj is floats
    empty = WireTensor("f32", (0,), memoryview(array("f")))
    assert len(empty.data) == 0


def test_a_strided_view_is_refused():
    """Bytes that do not lie side by side cannot leave without a copy."""
    with pytest.raises(ValueError, match="contiguous"):
        WireTensor("u8", (2,), memoryview(bytes(4))[::2])
