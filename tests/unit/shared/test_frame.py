"""Frames by value: the layout, each limit reached and passed, each way to be malformed."""

from __future__ import annotations

import struct

import orjson
import pytest

from shared.errors import FrameError
from shared.frame import (
    ALIGNMENT_BYTES,
    MAGIC,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    FrameLimits,
    decode_frame,
    encode_frame,
)
from shared.tensor_spec import WireTensor

LIMITS = FrameLimits(header_bytes_max=200, payload_bytes_max=256, tensors_max=2, rank_max=3, name_chars_max=8)


def frame_of(header: object, payload: bytes = b"", *, version: int = PROTOCOL_VERSION, flags: int = 0) -> bytes:
    """A frame laid out by hand, so that the tests do not lean on the encoder."""
    encoded = header if isinstance(header, bytes) else orjson.dumps(header)
    head = MAGIC + struct.pack("<BBHI", version, flags, 0, len(encoded)) + encoded
    padding = bytes(-len(head) % ALIGNMENT_BYTES) if payload else b""
    return head + padding + payload


def code_of(data: bytes, limits: FrameLimits = LIMITS) -> str:
    """The code with which decoding fails."""
    with pytest.raises(FrameError) as caught:
        decode_frame(data, limits)
    return caught.value.code


def u8(size: int) -> WireTensor:
    """A tensor of so many bytes."""
    return WireTensor("u8", (size,), memoryview(bytes(size)))


def test_a_frame_without_tensors_is_prefix_and_header():
    """No padding and no payload: a heartbeat stays small."""
    pieces = encode_frame({"kind": "heartbeat", "seq": 1})
    assert pieces == [b'MSHN\x01\x00\x00\x00\x1c\x00\x00\x00{"kind":"heartbeat","seq":1}']
    assert decode_frame(pieces[0]).header == {"kind": "heartbeat", "seq": 1}


def test_tensors_are_views_on_both_sides():
    """Encoding puts the caller's own buffer among the pieces, decoding slices the received one."""
    source = bytearray(range(8))
    tensor = WireTensor("f32", (2,), memoryview(source))
    pieces = encode_frame({"kind": "x"}, {"a": tensor, "b": u8(3)})
    assert any(isinstance(piece, memoryview) and piece.obj is source for piece in pieces)
    received = b"".join(pieces)
    frame = decode_frame(received)
    assert frame.header == {"kind": "x"}
    assert frame.tensors == {"a": tensor, "b": u8(3)}
    assert frame.tensors["a"].data.obj is received


def test_every_tensor_starts_at_a_multiple_of_64_in_the_frame():
    """So that a receiver whose buffer is aligned maps tensors that are."""
    received = b"".join(encode_frame({"kind": "x"}, {"a": u8(1), "b": u8(65), "c": u8(2)}))
    descriptors = orjson.loads(received[PREFIX_BYTES : received.index(b"}}") + 2])["tensors"]
    payload_start = len(received) - descriptors["c"][2] - 2
    assert payload_start % ALIGNMENT_BYTES == 0
    assert [offset for _, _, offset, _ in descriptors.values()] == [0, 64, 192]


def test_empty_and_scalar_tensors_travel():
    """Zero elements and zero dimensions are shapes like any other."""
    scalar = WireTensor("f64", (), memoryview(bytes(8)))
    tensors = {"none": u8(0), "one": scalar, "last": WireTensor("i8", (2, 0), memoryview(b""))}
    assert decode_frame(b"".join(encode_frame({"kind": "x"}, tensors))).tensors == tensors


def test_reserved_bytes_padding_and_extra_descriptor_fields_are_ignored():
    """What a later minor version may put there does not disturb this one."""
    data = bytearray(frame_of({"kind": "x", "tensors": {"a": ["u8", [1], 0, 1, "crc32c:0"]}}, b"\x07"))
    data[6:8] = b"\xff\xff"
    data[-2] = 0xEE
    assert decode_frame(bytes(data)).tensors == {"a": WireTensor("u8", (1,), memoryview(b"\x07"))}


def test_of_a_repeated_key_the_last_counts():
    """JSON leaves it open; both sides must read the same."""
    assert decode_frame(frame_of(b'{"kind":"a","kind":"b"}')).header == {"kind": "b"}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "truncated"),
        (b"MSHN\x01\0\0\0\0\0\0", "truncated"),
        (b"HTTP/1.1 400", "bad_magic"),
        (frame_of({}, version=0), "unsupported_version"),
        (frame_of({}, version=2), "unsupported_version"),
        (frame_of({}, flags=1), "unsupported_flags"),
        (frame_of({"kind": "x"})[:-1], "truncated"),
        (MAGIC + struct.pack("<BBHI", 1, 0, 0, 2**32 - 1), "header_too_large"),
        (frame_of(b""), "bad_header"),
        (frame_of(b"{"), "bad_header"),
        (frame_of(b"[]"), "bad_header"),
        (frame_of(b"null"), "bad_header"),
        (frame_of(b'{"a":NaN}'), "bad_header"),
        (frame_of(b'{"a":1e999}'), "bad_header"),
        (frame_of(b'{"a":"\xff"}'), "bad_header"),
        (frame_of(b'{"a":"\\ud800"}'), "bad_header"),
        (frame_of(b"[" * 190), "bad_header"),
        (frame_of({"kind": "x"}) + b"\0", "trailing_bytes"),
    ],
)
def test_malformed_frames_have_codes(data: bytes, code: str):
    """Each way of not being a frame is one documented code."""
    assert code_of(data) == code


def test_deep_nesting_is_a_bad_header():
    """A header of nothing but brackets ends in an error, not in the interpreter's recursion limit."""
    assert code_of(frame_of(b'{"a":' * 30_000), FrameLimits()) == "bad_header"
    assert code_of(frame_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), FrameLimits()) == "bad_header"


@pytest.mark.parametrize(
    ("descriptors", "payload", "code"),
    [
        ([], b"", "bad_tensor"),
        ({}, b"", "bad_tensor"),
        ("u8", b"", "bad_tensor"),
        ({"a": None}, b"", "bad_tensor"),
        ({"a": ["u8", [1], 0]}, b"\0", "bad_tensor"),
        ({"a": ["f8", [1], 0, 1]}, b"\0", "bad_tensor"),
        ({"a": [["u8"], [1], 0, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", 1, 0, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", [True], 0, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", [1.0], 0, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", [-1], 0, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", [1], 0, 2]}, b"\0\0", "bad_tensor"),
        ({"a": ["u8", [1], -64, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", [1], 1, 1]}, b"\0\0", "bad_tensor"),
        ({"a": ["u8", [1], 64, 1]}, bytes(65), "bad_tensor"),
        ({"a": ["u8", [1], 0, 1], "b": ["u8", [1], 0, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", [2], 0, 2]}, b"\0", "truncated"),
        ({"a": ["u8", [2**63, 2**63, 2**63], 0, 2**63]}, b"\0", "truncated"),
        ({"a": ["u8", [1], 0, 1]}, b"\0\0", "trailing_bytes"),
        ({"a" * 9: ["u8", [1], 0, 1]}, b"\0", "bad_tensor"),
        ({"a": ["u8", [1, 1, 1, 1], 0, 1]}, b"\0", "rank_too_large"),
        ({"a": ["u8", [1], 0, 1], "b": 0, "c": 0}, b"\0", "too_many_tensors"),
        ({"a": ["u8", [257], 0, 257]}, bytes(257), "payload_too_large"),
    ],
)
def test_malformed_tensors_have_codes(descriptors: object, payload: bytes, code: str):
    """What the header says of tensors is believed only where the payload agrees."""
    assert code_of(frame_of({"kind": "x", "tensors": descriptors}, payload)) == code


@pytest.mark.parametrize(
    ("header", "tensors", "code"),
    [
        ({"kind": "x" * 200}, None, "header_too_large"),
        ({"kind": "x" * 200}, {"a": u8(1)}, "header_too_large"),
        ({"kind": "x"}, {"a": u8(200), "b": u8(1)}, "payload_too_large"),
        ({"kind": "x"}, {"a": u8(1), "b": u8(1), "c": u8(1)}, "too_many_tensors"),
        ({"kind": "x"}, {"a": WireTensor("u8", (1, 1, 1, 1), memoryview(b"\0"))}, "rank_too_large"),
        ({"kind": "x"}, {"a" * 9: u8(1)}, "bad_tensor"),
    ],
)
def test_what_a_receiver_would_refuse_is_not_encoded(
    header: dict[str, object], tensors: dict[str, WireTensor] | None, code: str
):
    """Every limit of the decoder is one of the encoder."""
    limits = FrameLimits(payload_bytes_max=256) if code == "payload_too_large" else LIMITS
    with pytest.raises(FrameError) as caught:
        encode_frame(header, tensors, limits)
    assert caught.value.code == code


def test_frames_exactly_at_the_limits_pass():
    """A limit is the largest value allowed: header, payload, tensors, rank and name at once."""
    tensors = {"a" * 8: WireTensor("u8", (64, 1, 1), memoryview(bytes(64))), "b": u8(192)}
    short = b"".join(encode_frame({"kind": ""}, tensors, LIMITS))
    header = {"kind": "x" * (LIMITS.header_bytes_max - header_bytes(short))}
    data = b"".join(encode_frame(header, tensors, LIMITS))
    assert header_bytes(data) == LIMITS.header_bytes_max
    assert decode_frame(data, LIMITS).tensors == tensors
    assert len(data) <= LIMITS.frame_bytes_max


def header_bytes(data: bytes) -> int:
    """The header length that a frame announces."""
    return int.from_bytes(data[8:PREFIX_BYTES], "little")


@pytest.mark.parametrize("value", ["\ud800", 2**64, {1}, {1: 2}])
def test_a_header_that_is_not_json_is_our_own_fault(value: object):
    """What JSON cannot hold is a `ValueError`, not a peer's error."""
    with pytest.raises(ValueError, match="JSON"):
        encode_frame({"kind": "x", "value": value})


def test_an_announced_size_allocates_nothing():
    """A header that announces 4 GiB and a tensor of 2^63 elements are refused on what is there."""
    assert code_of(MAGIC + struct.pack("<BBHI", 1, 0, 0, 2**32 - 1), FrameLimits(header_bytes_max=2**33)) == "truncated"
    huge = {"a": ["f64", [2**60], 0, 2**63]}
    assert code_of(frame_of({"kind": "x", "tensors": huge}, b"\0"), FrameLimits(payload_bytes_max=2**62)) == "truncated"
