"""Properties of the protocol core: whatever is sent arrives equal, and whatever else arrives is a typed error.

Legend: a *message* is any that the types allow, a *frame* its bytes, *garbage* anything else.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_args

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from shared.errors import CACHE_MISS_REASONS, FrameError, LinkClosed, RemoteProtocolError
from shared.fields import BIAS_MAX, COUNT_MAX, NAME_CHARS_MAX
from shared.frame import MAGIC, FrameLimits, decode_frame, encode_frame
from shared.layers import LayerRange
from shared.link_state import Broken, LinkProtocol, LinkState, Received, Unanswerable
from shared.messages import (
    LOGPROBS_MAX,
    MESSAGE_TYPES,
    PENALTY_MAX,
    CacheMiss,
    Cancel,
    Drain,
    Error,
    Fork,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    MachineInfo,
    Message,
    NodeInfo,
    NodeState,
    NodeStats,
    Pooling,
    Probe,
    Refused,
    Release,
    SamplingParams,
    Step,
    StepResult,
    Unload,
    Unsupported,
    Welcome,
    decode_header,
    encode_header,
)
from shared.route import Hop, Route
from shared.tensor_spec import ITEM_BYTES, WireTensor
from shared.websocket import cut_fragments
from tests.fuzz.fuzz_frame import FRAME_CODES

# --- strategies --------------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), max_size=200)
ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=NAME_CHARS_MAX)
counts = st.integers(0, COUNT_MAX)
counters = st.dictionaries(ids, counts, max_size=5)
layer_ranges = st.builds(
    lambda start, length: LayerRange(start, start + length), st.integers(0, 200), st.integers(1, 99)
)
states = st.sampled_from(get_args(NodeState))


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Hops that follow one another."""
    ends = sorted(draw(st.sets(st.integers(1, 100), min_size=1, max_size=6)))
    return Route(tuple(Hop(draw(ids), LayerRange(a, b)) for a, b in zip([0, *ends], ends, strict=False)))


id_lists = st.lists(counts, max_size=3).map(tuple)
penalties = st.floats(-PENALTY_MAX, PENALTY_MAX)
sampling_params = st.builds(
    SamplingParams, temperature=st.floats(0, 100), top_p=st.floats(0, 1), seed=counts, prompt_len=counts, grammar=text,
    allowed_ids=id_lists, banned_ids=id_lists, end_ids=id_lists, min_tokens=counts,
    logit_bias=st.lists(st.tuples(counts, st.floats(-BIAS_MAX, BIAS_MAX)), max_size=3).map(tuple),
    repetition_penalty=st.floats(0, PENALTY_MAX), frequency_penalty=penalties, presence_penalty=penalties,
    min_p=st.floats(0, 1), top_k=counts, logprobs=st.none() | st.integers(0, LOGPROBS_MAX),
)  # fmt: skip
node_infos = st.builds(
    NodeInfo, node=ids, pid=counts, model=ids, model_name=text, layers=layer_ranges, num_layers=counts, state=states,
    kv_cache=st.booleans(), sampling=st.lists(ids, max_size=3).map(tuple), kv_ttl_s=st.floats(0, 1e6),
    needs_token_ids=st.booleans(), refused_cuts=st.lists(counts, max_size=3).map(tuple),
)  # fmt: skip
machine_infos = st.builds(
    MachineInfo, device=ids, dtype=st.none() | ids, memory_bytes=counts, runtime_bytes=counts, read_bytes_per_s=counts,
    prefill_bytes_per_s=counts, models=st.lists(ids, max_size=3).map(tuple),
)  # fmt: skip
node_stats = st.builds(
    NodeStats, state=states, steps=counters, misses=counters, evictions=counters, errors=counters, busy_us=counts
)  # fmt: skip
step_ids: dict[str, st.SearchStrategy[Any]] = {"session": ids, "step_index": counts, "epoch": counts}
optional_counts = st.none() | counts

MESSAGES: dict[str, st.SearchStrategy[Message]] = {
    "hello": st.builds(
        Hello, versions=st.lists(counts, max_size=3).map(tuple), role=st.sampled_from(["gateway", "node"]), peer=ids,
        token=st.none() | text, model=st.none() | ids, node=st.none() | node_infos,
        machine=st.none() | machine_infos, software=ids,
    ),
    "welcome": st.builds(
        Welcome, version=counts, peer=ids, node=st.none() | node_infos, machine=st.none() | machine_infos, software=ids
    ),
    "refused": st.builds(Refused, code=ids, message=text),
    "load": st.builds(
        Load, layers=layer_ranges, model=ids, model_name=text, num_layers=counts, files=st.none() | text
    ),
    "unload": st.builds(Unload),
    "load_progress": st.builds(LoadProgress, done_bytes=counts, total_bytes=counts),
    "loaded": st.builds(Loaded, node=node_infos, error=st.none() | text),
    "step": st.builds(
        Step, **step_ids, cache=st.sampled_from([None, "prefill", "decode"]), past_len=counts,
        rewind_from=optional_counts, new_len=counts, layers=layer_ranges, model=ids, output_len=optional_counts,
        sampling=st.none() | sampling_params, route=st.none() | routes(),
        score=st.none() | st.integers(0, LOGPROBS_MAX), pool=st.none() | st.sampled_from(get_args(Pooling)),
    ),
    "step_result": st.builds(
        StepResult, **step_ids, cached=st.booleans(), token_ids=st.none() | st.lists(counts, max_size=4).map(tuple),
        text=st.none() | text, compute_us=counts, queue_us=counts,
    ),
    "cache_miss": st.builds(
        CacheMiss, **step_ids, reason=st.sampled_from(CACHE_MISS_REASONS), held_len=optional_counts
    ),
    "error": st.builds(Error, code=ids, message=text, session=ids, step_index=optional_counts, epoch=counts),
    "fork": st.builds(
        Fork, session=ids, target=ids, past_len=counts, epoch=counts, layers=layer_ranges, model=ids,
        sampling=st.none() | sampling_params,
    ),
    "release": st.builds(Release, session=ids),
    "cancel": st.builds(Cancel, session=ids),
    "heartbeat": st.builds(Heartbeat, seq=counts, reply=st.booleans(), stats=st.none() | node_stats),
    "probe": st.builds(Probe, seq=counts, reply=st.booleans()),
    "drain": st.builds(Drain),
    "unsupported": st.builds(Unsupported, unsupported=text),
}  # fmt: skip
messages = st.one_of(list(MESSAGES.values()))


@st.composite
def wire_tensors(draw: st.DrawFn) -> WireTensor:
    """A small tensor of any element type and rank, with bytes that are not all alike."""
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = ITEM_BYTES[dtype] * math.prod(shape)
    return WireTensor(dtype, shape, memoryview(draw(st.binary(min_size=size, max_size=size))))


tensors = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=20), wire_tensors(), max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


def open_side() -> LinkProtocol:
    """The acceptor's side of an open link."""
    protocol = LinkProtocol("acceptor")
    protocol.state = LinkState.OPEN
    return protocol


# --- round trips -------------------------------------------------------------------------------


def test_there_is_a_strategy_for_every_message():
    """The properties below cover every kind there is."""
    assert set(MESSAGES) == set(MESSAGE_TYPES)


@given(message=messages, carried=tensors)
def test_whatever_is_sent_arrives_equal(message: Message, carried: dict[str, WireTensor]):
    """Any message with any tensors: the header survives as JSON and the tensors as bytes."""
    data = b"".join(encode_frame(encode_header(message), carried))
    frame = decode_frame(data)
    assert decode_header(frame.header) == message
    assert frame.tensors == carried
    assert list(frame.tensors) == list(carried)


@given(message=messages, extra=st.dictionaries(text.map("x-".__add__), json_values, max_size=4))
def test_unknown_fields_change_nothing(message: Message, extra: dict[str, object]):
    """Whatever a newer peer adds under names of its own, the message is the same."""
    frame = decode_frame(b"".join(encode_frame({**extra, **encode_header(message)}))) if _fits(extra) else None
    if frame is not None:
        assert decode_header(frame.header) == message


def _fits(extra: dict[str, object]) -> bool:
    try:
        orjson.dumps(extra)
    except TypeError:  # an integer beyond 64 bits, which no header can hold
        return False
    return True


# --- any split of the bytes --------------------------------------------------------------------


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The same bytes in pieces, cut at the given places."""
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def websocket_pair() -> tuple[ClientProtocol, ServerProtocol]:
    """Two ends of an open WebSocket without sockets, with the options that links use."""
    client = ClientProtocol(parse_uri("ws://127.0.0.1:1/"), state=OPEN, max_size=FrameLimits().frame_bytes_max)
    server = ServerProtocol(state=OPEN, max_size=FrameLimits().frame_bytes_max)
    return client, server


places = st.lists(st.integers(0, 100_000), max_size=12)


@given(sent=st.lists(st.tuples(messages, tensors), min_size=1, max_size=3), fragments=places, packets=places)
@settings(max_examples=60)
def test_any_split_of_the_bytes_arrives_the_same(
    sent: list[tuple[Message, dict[str, WireTensor]]], fragments: list[int], packets: list[int]
):
    """Frames cut into any WebSocket fragments, and these into any TCP packets, are the messages that were sent."""
    client, server = websocket_pair()
    for message, carried in sent:
        pieces = cut(b"".join(encode_frame(encode_header(message), carried)), fragments)
        client.send_binary(pieces[0], fin=len(pieces) == 1)
        for piece in pieces[1:]:
            client.send_continuation(piece, fin=False)
        if len(pieces) > 1:
            client.send_continuation(b"", fin=True)
    for packet in cut(b"".join(client.data_to_send()), packets):
        server.receive_data(packet)
    assert received_by(server) == sent


def received_by(server: ServerProtocol) -> list[tuple[Message, dict[str, WireTensor]]]:
    """The messages among the WebSocket frames that have arrived."""
    received: list[tuple[Message, dict[str, WireTensor]]] = []
    parts = b""
    for event in server.events_received():
        assert isinstance(event, WebSocketFrame)
        assert event.opcode in {Opcode.BINARY, Opcode.CONT}
        parts += event.data
        if event.fin:
            frame = decode_frame(parts)
            received.append((decode_header(frame.header), frame.tensors))
            parts = b""
    return received


@given(pieces=st.lists(st.binary(max_size=50), max_size=6))
def test_fragments_are_the_same_bytes(pieces: list[bytes]):
    """Cutting pieces into fragments neither loses, repeats nor reorders a byte."""
    assert b"".join(cut_fragments(pieces)) == b"".join(pieces)


# --- garbage -----------------------------------------------------------------------------------


def assert_documented(data: bytes) -> None:
    """What arrives is a message, an unknown kind, or a documented error; never anything else."""
    protocol = open_side()
    event = protocol.receive(data)
    if isinstance(event, Received):
        assert protocol.state in {LinkState.OPEN, LinkState.DRAINING}
    elif isinstance(event, Unanswerable):
        assert protocol.state is LinkState.OPEN
        assert event.reply
    else:
        assert isinstance(event, Broken)
        assert protocol.state is LinkState.CLOSED
        assert isinstance(event.error, FrameError | RemoteProtocolError | LinkClosed)
        if isinstance(event.error, FrameError):
            assert event.error.code in FRAME_CODES
            assert event.reply


@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=MAGIC)
def test_any_bytes_are_a_documented_error(data: bytes):
    """Random bytes end the link with a code that docs/protocol.md lists."""
    assert_documented(data)


@given(version=st.integers(0, 255), flags=st.integers(0, 255), header=json_values, payload=st.binary(max_size=200))
def test_any_header_is_a_documented_error(version: int, flags: int, header: object, payload: bytes):
    """A frame whose prefix is right and whose header is any JSON value."""
    encoded = json.dumps(header).encode()
    for first in (bytes([version, flags]), b"\x01\x00"):
        assert_documented(MAGIC + first + b"\0\0" + len(encoded).to_bytes(4, "little") + encoded + payload)


@given(kind=st.sampled_from(sorted(MESSAGE_TYPES)), data=st.data())
def test_any_field_values_are_a_documented_error(kind: str, data: st.DataObject):
    """A header that names a real kind and its real fields, with any JSON value in each."""
    names = [field.name for field in fields(MESSAGE_TYPES[kind])]
    values = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, json_values)))
    assert code_of({"kind": kind, **values}) in {None, "bad_message"}


def code_of(header: dict[str, object]) -> str | None:
    """The code with which reading a header fails, or None."""
    try:
        decode_header(header)
    except FrameError as error:
        return error.code
    return None


@given(
    message=messages, carried=tensors, at=st.integers(0, 10_000), to=st.integers(0, 255), length=st.integers(0, 10_000)
)
def test_any_damage_is_a_documented_error(
    message: Message, carried: dict[str, WireTensor], at: int, to: int, length: int
):
    """One changed byte, and a frame cut short or made longer anywhere."""
    data = bytearray(b"".join(encode_frame(encode_header(message), carried)))
    assert_documented(bytes(data[: length % (len(data) + 1)]))
    assert_documented(bytes(data) + bytes(1 + length % 70))
    data[at % len(data)] = to
    assert_documented(bytes(data))


@given(
    descriptors=st.dictionaries(text, json_values | st.lists(json_values, max_size=5), max_size=3),
    payload=st.binary(max_size=200),
)
def test_any_descriptors_are_a_documented_error(descriptors: dict[str, object], payload: bytes):
    """Whatever the header claims about tensors."""
    encoded = json.dumps({"kind": "drain", "tensors": descriptors}).encode()
    head = MAGIC + b"\x01\0\0\0" + len(encoded).to_bytes(4, "little") + encoded
    assert_documented(head + bytes(-len(head) % 64) + payload)
