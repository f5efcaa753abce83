"""All vectors of one call, a few at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from gateway.bounded_tasks import run_bounded
from gateway.embeddings.schema import EmbeddingsRequest
from gateway.embeddings.vectors import encode_vector, finished_vector
from gateway.openai_errors import json_bytes
from gateway.state import TokenSource

EMBEDS_AT_ONCE = 4
"""Of one call: nodes batch what runs at the same time, and other callers need places too."""


async def embed_all(
    source: TokenSource, ids: Sequence[tuple[int, ...]], asked: EmbeddingsRequest, *, request_id: str
) -> list[array[float]]:
    """One vector for each text, in their order. Cancelling ends all work.

    Raises:
        MeshError: The mesh refuses or fails one; the others are given up.
    """
    vectors: list[array[float]] = [array("f")] * len(ids)

    def job(index: int) -> Callable[[], Any]:
        async def embed_one() -> None:
            hidden = await source.embed(ids[index], pooling=asked.pooling, request_id=request_id)
            vectors[index] = finished_vector(hidden, normalize=asked.normalize)

        return embed_one

    await run_bounded(map(job, range(len(ids))), at_once=min(EMBEDS_AT_ONCE, len(ids)))
    return vectors


def embeddings_body(vectors: Sequence[array[float]], asked: EmbeddingsRequest, *, model: str, tokens: int) -> bytes:
    """The response's JSON."""
    data = [
        {"object": "embedding", "index": index, "embedding": encode_vector(vector, asked.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_bytes({"object": "list", "data": data, "model": model, "usage": usage})
