"""Invariants of whatever bytes come.

Any bytes received on a link are a message, an unknown kind or an error of `FRAME_CODES`; nothing else. And no first
frame opens a link unless it is a hello that holds one of the mesh's tokens.

Run it for as long as you like with ``python tests/fuzz/fuzz_frame.py`` where atheris is installed;
`test_fuzz_frame.py` runs a bounded number of seeded mutations everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

from shared.errors import FrameError, LinkClosed, RemoteProtocolError
from shared.frame import MAGIC, FrameLimits, encode_frame
from shared.handshake import VERSIONS, check_hello
from shared.layers import LayerRange
from shared.link_state import Broken, LinkProtocol, LinkState, Received, Unanswerable
from shared.messages import (
    Error,
    Heartbeat,
    Hello,
    Message,
    NodeInfo,
    NodeStats,
    SamplingParams,
    Step,
    StepResult,
    encode_header,
)
from shared.route import Hop, Route
from shared.tensor_spec import WireTensor

FRAME_CODES = frozenset(
    {
        "truncated",
        "bad_magic",
        "unsupported_version",
        "unsupported_flags",
        "header_too_large",
        "bad_header",
        "payload_too_large",
        "too_many_tensors",
        "rank_too_large",
        "bad_tensor",
        "trailing_bytes",
        "bad_message",
        "handshake_too_large",
    }
)
"""Every code with which a received frame can be refused; docs/protocol.md explains each."""

LIMITS = FrameLimits(header_bytes_max=4096, payload_bytes_max=4096, tensors_max=4)
MUTATIONS_MAX = 8
TOKENS = ("token-new", "token-old")
_VALUES = (None, "", "token-new", "TOKEN-NEW", "token-ne", ["token-new"], {"token": "token-new"}, 0, -1, True, [1], [])
_INTERESTING = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    MAGIC,
    b"[",
    b"{",
    b'"',
    b"null",
    b"-1",
    b"1e999",
    b"9" * 30,
    b"64",
)


def check(data: bytes) -> None:
    """Assert the invariant for one input, in every state in which a link listens."""
    for state in (LinkState.NEW, LinkState.OFFERED, LinkState.OPEN, LinkState.DRAINING):
        protocol = LinkProtocol("acceptor", LIMITS)
        protocol.state = state
        event = protocol.receive(data)
        if isinstance(event, Broken):
            assert protocol.state is LinkState.CLOSED
            assert isinstance(event.error, RemoteProtocolError | LinkClosed) or (
                type(event.error) is FrameError and event.error.code in FRAME_CODES
            )
        else:
            assert isinstance(event, Received | Unanswerable)
            assert protocol.state is not LinkState.CLOSED
            assert all(tensor.data.nbytes <= len(data) for tensor in getattr(event, "tensors", {}).values())


def check_handshake(data: bytes) -> bool:
    """Assert the second invariant for one first frame; returns whether it would have opened a link."""
    protocol = LinkProtocol("acceptor", LIMITS)
    event = protocol.receive(data)
    if not isinstance(event, Received):
        return False
    hello = event.message
    assert isinstance(hello, Hello), f"a link began with {hello.kind}"
    refusal = check_hello(hello, tokens=TOKENS, model="m")
    if refusal is None:
        assert hello.token in TOKENS
        return True
    unknown = [token for token in TOKENS if token.encode() not in data]  # what a peer says, it may be told
    assert not any(token in refusal.message for token in unknown), refusal.message
    protocol.send(refusal)
    return False


def create_hellos() -> list[dict[str, Any]]:
    """First messages of peers that have a token, have none, or are of another mesh."""
    tokens = [*TOKENS, "token-another", "", None]
    return [
        encode_header(Hello(versions=VERSIONS, role="gateway", peer="g", token=token, model="m")) for token in tokens
    ]


def damage(rng: Random, header: dict[str, Any]) -> dict[str, Any]:
    """A header with a few fields taken away, added or given to each other's values."""
    damaged = dict(header)
    values = (*_VALUES, *header.values())
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*header, "token", "tokens", "node", "machine", "zzz"])
        if rng.random() < 0.2:
            damaged.pop(name, None)
        else:
            damaged[name] = rng.choice(values)
    return damaged


def create_corpus() -> list[bytes]:
    """One good frame of each shape there is: the starting points of every mutation."""
    layers = LayerRange(0, 12)
    node = NodeInfo(node="n1", model="0123456789abcdef", layers=layers, num_layers=24, sampling=("seed",))
    stats = NodeStats(steps={"decode": 3}, misses={"expired": 1}, evictions={}, errors={})
    hidden = WireTensor("bf16", (1, 2, 32), memoryview(bytes(range(128))))
    route = Route((Hop("n1", layers), Hop("n2", LayerRange(12, 24))))
    step = Step(session="s", step_index=1, layers=layers, model="m", sampling=SamplingParams(seed=1), route=route)
    plain: list[Message] = [
        Hello(versions=(1,), role="node", peer="n1", token="t", node=node),
        Heartbeat(seq=1, reply=True, stats=stats),
        StepResult(session="s", step_index=1, token_ids=(1, 2)),
        Error(code="bad_step", message="é", session="s"),
    ]
    frames = [b"".join(encode_frame(encode_header(message))) for message in plain]
    ids = WireTensor("i32", (1, 2), memoryview(bytes(8)))
    frames.append(b"".join(encode_frame(encode_header(step), {"token_ids": ids, "hidden_states": hidden})))
    frames.append(b"".join(encode_frame({"kind": "teleport", "where": [1, {"x": None}]})))
    return frames


def mutate(rng: Random, corpus: list[bytes]) -> bytes:
    """A frame of the corpus with a few bytes changed, cut out, doubled or replaced by interesting ones."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, MUTATIONS_MAX)):
        at, length = rng.randrange(len(data) + 1), rng.randint(1, 16)
        piece = bytes(data[at : at + length])
        changes: tuple[Callable[[], bytes], ...] = (
            lambda: rng.randbytes(1),
            lambda: b"",
            lambda piece=piece: piece + piece,
            lambda: rng.choice(_INTERESTING),
            lambda: rng.choice(_INTERESTING) * rng.randint(1, 500),
        )
        data[at : at + rng.choice((1, length))] = rng.choice(changes)()
    return bytes(data)


def main() -> None:
    """Fuzz until stopped."""
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
