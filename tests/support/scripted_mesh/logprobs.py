"""Log-probabilities and embeddings that are made up but consistent, as tensors of a step's result."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from shared.tensor_spec import WireTensor
from tests.support.fake_model import mix

ANSWER_LOGPROB = math.log(0.5)
"""Of a token of an answer whose script names none."""
EMBEDDING_SIZE = 16
_SHARES = 16
Row = list[tuple[int, float]]
"""Ids with log-probabilities: first the token itself, then the likeliest, best first."""


def logprob_row(token: int, logprob: float, *, alternatives: int, vocab_size: int, seed: int) -> Row:
    """A token's log-probability among so many likeliest ones; the others share what it leaves, by halves.

    Args:
        token: What stands there.
        logprob: Its own.
        alternatives: How many of the likeliest are wanted.
        vocab_size: The alternatives are below it.
        seed: Decides which they are.
    """
    left = 1.0 - math.exp(logprob)
    chosen, row = {token}, [(token, logprob)]
    candidate = mix(seed, token)
    while len(row) <= alternatives and len(chosen) < vocab_size:
        candidate = mix(candidate, len(row))
        if (other := candidate % vocab_size) not in chosen:
            left /= 2
            chosen.add(other)
            row.append((other, math.log(left) if left > 0 else -math.inf))
    likeliest = sorted(row, key=lambda pair: -pair[1])[:alternatives]
    return [(token, logprob), *likeliest]


def prompt_logprob(before: int, token: int) -> float:
    """Of a token of a scored prompt after another: between 1/16 and 1/2, often not the likeliest."""
    return math.log((1 + mix(before, token) % (_SHARES // 2)) / _SHARES)


def logprob_tensors(rows: Sequence[Row], *, alternatives: int) -> dict[str, WireTensor]:
    """Rows with so many alternatives as `logprobs` and `logprob_ids`."""
    shape = (len(rows), 1 + alternatives)
    pairs = [pair for row in rows for pair in row]
    values = struct.pack(f"<{len(pairs)}f", *(logprob for _, logprob in pairs))
    ids = struct.pack(f"<{len(pairs)}i", *(token for token, _ in pairs))
    return {
        "logprobs": WireTensor("f32", shape, memoryview(values)),
        "logprob_ids": WireTensor("i32", shape, memoryview(ids)),
    }


def embedding_tensor(ids: Sequence[int]) -> dict[str, WireTensor]:
    """The sum of these tokens' vectors, whose numbers are between -1 and 1."""
    columns = [sum(mix(token, column) % 2001 / 1000 - 1 for token in ids) for column in range(EMBEDDING_SIZE)]
    data = memoryview(struct.pack(f"<{EMBEDDING_SIZE}f", *columns))
    return {"embedding": WireTensor("f32", (EMBEDDING_SIZE,), data)}
