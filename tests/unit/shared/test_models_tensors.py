"""Headers and indices: where a checkpoint's tensors are, found without reading them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.models.errors import ModelUnavailable
from shared.models.tensors import header_bytes, parse_header, parse_index


def header(**tensors: Any) -> bytes:
    """A safetensors header."""
    return json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()


def entry(dtype: Any = "BF16", shape: Any = (2, 3), offsets: Any = (0, 12)) -> dict[str, Any]:
    """One tensor's description, as JSON has it."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_header_gives_absolute_offsets() -> None:
    """Offsets in the file count from its start."""
    text = header(a=entry(), b=entry("F32", (2,), (12, 20)))
    a, b = parse_header(text, "f", 8 + len(text) + 20)
    assert (a.name, a.offset, a.nbytes, a.shape) == ("a", 8 + len(text), 12, (2, 3))
    assert (b.dtype, b.offset, b.num_elements) == ("F32", 8 + len(text) + 12, 2)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (entry(dtype="F7"), "unknown type 'F7'"),
        (entry(shape=(2, -3)), "no valid shape"),
        (entry(offsets=(0, 13)), "13 bytes, its shape takes 12"),
        (entry(offsets=(0,)), "no valid shape and offsets"),
        ([1], "not an object"),
        (entry(shape=(2, 2.0)), "no valid shape"),
        (entry(offsets=(40, 52)), "truncated"),
    ],
)
def test_a_damaged_header_names_file_and_tensor(tensor: Any, words: str) -> None:
    """Each kind of damage is a typed error that says what is wrong."""
    text = header(w=tensor)
    with pytest.raises(ModelUnavailable, match=words) as caught:
        parse_header(text, "model.safetensors", 8 + len(text) + 20)
    assert caught.value.code == "weights_corrupt"
    assert caught.value.fields["file"] == "model.safetensors"
    assert "'w'" in str(caught.value)


@pytest.mark.parametrize(("second", "shared"), [((8, 20), True), ((12, 24), False), ((0, 12), True)])
def test_tensors_must_not_share_bytes(second: tuple[int, int], shared: bool) -> None:
    """Overlapping ones are damage; touching ones are not, and neither is an empty one anywhere."""
    text = header(a=entry(), b=entry(offsets=second), empty=entry(shape=(0,), offsets=(4, 4)))
    if not shared:
        assert len(parse_header(text, "f", 8 + len(text) + 24)) == 3
        return
    with pytest.raises(ModelUnavailable, match=r"f gives tensors '[ab]' and '[ab]' the same bytes"):
        parse_header(text, "f", 8 + len(text) + 24)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe{}"])
def test_a_header_that_is_no_json_object_is_corrupt(text: bytes) -> None:
    """Garbage is never more than an error."""
    with pytest.raises(ModelUnavailable, match="weights_corrupt"):
        parse_header(text, "f", 100)


@pytest.mark.parametrize(
    ("prefix", "file_bytes"),
    [(b"", 0), (b"\x10\0\0\0", 4), ((50).to_bytes(8, "little"), 57), (b"\xff" * 8, 10**6), (bytes(8), 100)],
)
def test_an_impossible_header_length_is_corrupt(prefix: bytes, file_bytes: int) -> None:
    """A length beyond the file is refused before anything is read."""
    with pytest.raises(ModelUnavailable, match="weights_corrupt"):
        header_bytes(prefix, "f", file_bytes)


def test_a_possible_header_length_is_taken() -> None:
    """Up to the whole rest of the file."""
    assert header_bytes((50).to_bytes(8, "little"), "f", 58) == 50


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}',
     '{"weight_map": {"a": "x.bin"}}'],
)  # fmt: skip
def test_a_bad_index_is_corrupt(text: str) -> None:
    """Also one that names a file elsewhere."""
    with pytest.raises(ModelUnavailable, match="weights_corrupt"):
        parse_index(text)
