"""How many bytes tensors take, and which element type is the checkpoint's own."""

from __future__ import annotations

from shard.weight_map import majority_float, range_bytes
from shared.models.tensors import TensorEntry


def test_range_bytes_count_floats_in_the_wanted_type() -> None:
    """Integers stay as they are."""
    entries = [TensorEntry("a", "f", "BF16", (2, 3), 0), TensorEntry("b", "f", "I64", (2,), 12)]
    assert range_bytes(entries) == 28
    assert range_bytes(entries, 4) == 40


def test_the_checkpoints_own_type_is_the_one_of_most_bytes() -> None:
    """A few float32 norms do not make a float32 checkpoint."""
    entries = [TensorEntry("a", "f", "BF16", (100,), 0), TensorEntry("b", "f", "F32", (3,), 200)]
    assert majority_float(entries) == "BF16"
    assert majority_float([TensorEntry("b", "f", "I8", (3,), 0)]) is None
