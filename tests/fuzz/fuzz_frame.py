"""Invariant: any bytes received on a link are a message, an unknown kind or an error of `FRAME_CODES`; nothing else.

Run it for as long as you like with ``python tests/fuzz/fuzz_frame.py`` where atheris is installed;
`test_fuzz_frame.py` runs a bounded number of seeded mutations everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random

from shared.errors import FrameError, LinkClosed, RemoteProtocolError
from shared.frame import MAGIC, FrameLimits, encode_frame
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
