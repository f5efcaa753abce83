"""One frame: a fixed prefix, a JSON header, padding, and raw tensor bytes.

::

    offset  bytes  content
    0       4      magic ``MSHN``
    4       1      protocol major version
    5       1      flags, none defined yet: a set bit is one this version does not understand
    6       2      reserved, zero when sent, ignored when received
    8       4      header length H, little-endian
    12      H      header, a UTF-8 JSON object; its `kind` names the message
    ...     0-63   zero padding up to a multiple of 64, present only when tensors follow
    ...            payload: each tensor starts at a multiple of 64 from the payload's start

The header's `tensors` maps a name to ``[dtype, shape, offset, length]``; offsets count from the
payload's start. Tensors stand in the order of their offsets, each at the next multiple of 64 after the
one before, and the last one ends the frame. Of a key that a JSON object repeats, the last counts. A
received frame is only ever sliced, so no announced size causes an allocation.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from shared.errors import FrameError
from shared.tensor_spec import WireTensor

MAGIC = b"MSHN"
PROTOCOL_VERSION = 1
ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector register there is: a mapped tensor needs no realignment."""

_PREFIX = struct.Struct("<4sBBHI")
PREFIX_BYTES = _PREFIX.size
_ZEROS = bytes(ALIGNMENT_BYTES)
_DESCRIPTOR_FIELDS = 4
_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a receiver is willing to look at. Everything over a limit is a `FrameError`.

    Args:
        header_bytes_max: Room for a route of hundreds of hops and a large JSON schema.
        payload_bytes_max: A stateless step of 8,192 positions at hidden size 8,192 in float32.
        tensors_max: Hidden states, token ids and what models with several streams may add.
        rank_max: Dimensions of one tensor.
        name_chars_max: Length of a tensor's name.
    """

    header_bytes_max: int = 256 * 1024
    payload_bytes_max: int = 256 * 1024 * 1024
    tensors_max: int = 16
    rank_max: int = 8
    name_chars_max: int = 64

    @property
    def frame_bytes_max(self) -> int:
        """The longest WebSocket message that can hold a frame within these limits."""
        return PREFIX_BYTES + self.header_bytes_max + ALIGNMENT_BYTES + self.payload_bytes_max


DEFAULT_LIMITS = FrameLimits()


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame: the header without `tensors`, and the tensors by name."""

    header: dict[str, object]
    tensors: dict[str, WireTensor] = field(default_factory=dict)


def encode_frame(
    header: Mapping[str, object],
    tensors: Mapping[str, WireTensor] | None = None,
    limits: FrameLimits = DEFAULT_LIMITS,
) -> list[bytes | memoryview]:
    """Lay a frame out as the pieces whose concatenation is one WebSocket message.

    The tensors' own buffers are among the pieces, so nothing is copied here.

    Args:
        header: JSON-serializable fields; must not contain `tensors`.
        tensors: Tensors by name.
        limits: The same limits that the receiver checks, so an over-long frame fails where it is made.

    Raises:
        FrameError: `header_too_large`, `payload_too_large`, `too_many_tensors`, `rank_too_large`,
            `bad_tensor` for a name that is too long.
        ValueError: The header is not JSON-serializable.
    """
    if not tensors:
        encoded = _dump_header(header)
        _check_header_bytes(len(encoded), limits)
        return [_PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, 0, len(encoded)) + encoded]
    if len(tensors) > limits.tensors_max:
        raise _over("too_many_tensors", "tensors in a frame", len(tensors), limits.tensors_max)
    descriptors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    body: list[bytes | memoryview] = []
    offset = 0
    for name, tensor in tensors.items():
        _check_name_and_rank(name, len(tensor.shape), limits)
        padding = -offset % ALIGNMENT_BYTES
        if padding:
            body.append(_ZEROS[:padding])
        offset += padding
        descriptors[name] = (tensor.dtype, tensor.shape, offset, tensor.data.nbytes)
        body.append(tensor.data)
        offset += tensor.data.nbytes
    if offset > limits.payload_bytes_max:
        raise _over("payload_too_large", "payload bytes", offset, limits.payload_bytes_max)
    encoded = _dump_header({**header, "tensors": descriptors})
    _check_header_bytes(len(encoded), limits)
    padding = -(PREFIX_BYTES + len(encoded)) % ALIGNMENT_BYTES
    head = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, 0, len(encoded)) + encoded + _ZEROS[:padding]
    return [head, *body]


def decode_frame(data: bytes | bytearray | memoryview, limits: FrameLimits = DEFAULT_LIMITS) -> Frame:
    """Read one WebSocket message as a frame. The tensors are views into `data`.

    Raises:
        FrameError: `truncated`, `bad_magic`, `unsupported_version`, `unsupported_flags`,
            `header_too_large`, `bad_header`, `payload_too_large`, `too_many_tensors`,
            `rank_too_large`, `bad_tensor`, `trailing_bytes`.
    """
    view = memoryview(data).cast("B")
    if len(view) < PREFIX_BYTES:
        raise FrameError("truncated", f"a frame has at least {PREFIX_BYTES} bytes, got {len(view)}")
    magic, version, flags, _, header_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise FrameError("bad_magic", f"a frame starts with {MAGIC!r}, got {magic!r}")
    if version != PROTOCOL_VERSION:
        raise FrameError("unsupported_version", f"protocol version {version} is not {PROTOCOL_VERSION}")
    if flags:
        raise FrameError("unsupported_flags", f"flags {flags:#04x} are not understood")
    _check_header_bytes(header_bytes, limits)
    header_end = PREFIX_BYTES + header_bytes
    if len(view) < header_end:
        raise FrameError("truncated", f"the header announces {header_bytes} bytes, {len(view) - PREFIX_BYTES} follow")
    header = _read_header(view[PREFIX_BYTES:header_end])
    descriptors = header.pop("tensors", None)
    if descriptors is None:
        if len(view) > header_end:
            raise FrameError("trailing_bytes", f"{len(view) - header_end} bytes follow a header without tensors")
        return Frame(header)
    payload_start = header_end + -header_end % ALIGNMENT_BYTES
    payload = view[payload_start:]
    if len(payload) > limits.payload_bytes_max:
        raise _over("payload_too_large", "payload bytes", len(payload), limits.payload_bytes_max)
    return Frame(header, _read_tensors(descriptors, payload, limits))


def _read_header(encoded: memoryview) -> dict[str, object]:
    try:
        header = orjson.loads(encoded)
    except orjson.JSONDecodeError as error:
        raise FrameError("bad_header", f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("bad_header", f"the header is a {type(header).__name__}, not an object")
    return header


def _read_tensors(descriptors: object, payload: memoryview, limits: FrameLimits) -> dict[str, WireTensor]:
    if not isinstance(descriptors, dict) or not descriptors:
        raise FrameError("bad_tensor", "tensors must be a non-empty object")
    if len(descriptors) > limits.tensors_max:
        raise _over("too_many_tensors", "tensors in a frame", len(descriptors), limits.tensors_max)
    tensors: dict[str, WireTensor] = {}
    end = 0
    for name, descriptor in descriptors.items():
        dtype, shape, offset, length = _read_descriptor(name, descriptor, limits)
        if offset != end + -end % ALIGNMENT_BYTES:
            raise FrameError("bad_tensor", f"tensor {name!r} starts at {offset}, expected the next multiple of 64")
        end = offset + length
        if end > len(payload):
            raise FrameError("truncated", f"tensor {name!r} ends at {end}, the payload has {len(payload)} bytes")
        try:
            tensors[name] = WireTensor(dtype, shape, payload[offset:end])
        except ValueError as error:
            raise FrameError("bad_tensor", f"tensor {name!r}: {error}") from error
    if end < len(payload):
        raise FrameError("trailing_bytes", f"{len(payload) - end} bytes follow the last tensor")
    return tensors


def _read_descriptor(name: str, descriptor: object, limits: FrameLimits) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(descriptor, list) or len(descriptor) < _DESCRIPTOR_FIELDS:
        raise FrameError("bad_tensor", f"tensor {name[:_SHOWN_CHARS]!r} must be [dtype, shape, offset, length]")
    dtype, sizes, offset, length = descriptor[:_DESCRIPTOR_FIELDS]
    if not isinstance(dtype, str) or not isinstance(sizes, list):
        raise FrameError("bad_tensor", f"tensor {name[:_SHOWN_CHARS]!r} must be [dtype, shape, offset, length]")
    _check_name_and_rank(name, len(sizes), limits)
    for count in (*sizes, offset, length):
        if type(count) is not int or count < 0:
            raise FrameError("bad_tensor", f"sizes, offset and length of tensor {name!r} must be counts")
    return dtype, tuple(sizes), offset, length


def _check_name_and_rank(name: str, rank: int, limits: FrameLimits) -> None:
    if len(name) > limits.name_chars_max:
        raise _over("bad_tensor", "characters of a tensor's name", len(name), limits.name_chars_max)
    if rank > limits.rank_max:
        raise _over("rank_too_large", f"rank of tensor {name!r}", rank, limits.rank_max)


def _dump_header(header: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(header)
    except TypeError as error:  # what orjson raises for lone surrogates, huge integers and foreign types
        raise ValueError(f"the header cannot be written as JSON: {error}") from error


def _check_header_bytes(header_bytes: int, limits: FrameLimits) -> None:
    if header_bytes > limits.header_bytes_max:
        raise _over("header_too_large", "header bytes", header_bytes, limits.header_bytes_max)


def _over(code: str, what: str, value: int, limit: int) -> FrameError:
    return FrameError(code, f"{what}: {value} is over the limit of {limit}", value=value, limit=limit)
