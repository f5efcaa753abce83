"""A node is lost and nobody takes its place: what callers see while they wait, and at the end of the wait."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.scripted_mesh import RunningMesh, running_scripted_mesh

FAILOVER_TIMEOUT_S, KEEP_ALIVE_S = 1.0, 0.1
MARGIN_S = 2.0
"""For a machine that is busy; the loss itself is seen at once, as the end of a link."""
SCRIPT: dict[str, Any] = {
    "version": 1,
    "model": {"name": "made-up"},
    "rules": [
        {"match": {"contains": "for ever"}, "answers": [{"text": "ab", "split": "character", "end": False}]},
        {
            "match": {"contains": "is lost"},
            "answers": ["one two three four five six"],
            "faults": [{"at": 2, "kind": "crash", "hop": "middle"}],
        },
    ],
    "gateway": [
        *("--failover-timeout-seconds", str(FAILOVER_TIMEOUT_S)),
        *("--stream-keep-alive-seconds", str(KEEP_ALIVE_S)),
    ],
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[RunningMesh]:
    """A real gateway over three nodes, of which the middle one goes and does not come back."""
    with running_scripted_mesh(SCRIPT) as running:
        yield running


@dataclass
class Seen:
    """What a streaming caller sees: events with the time at which each came, and when the response was over."""

    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    comments: list[float] = field(default_factory=list)
    is_done: bool = False
    ended_at: float = 0.0


def body(content: str, **parameters: Any) -> dict[str, Any]:
    """A request."""
    return {"model": "made-up", "messages": [{"role": "user", "content": content}], **parameters}


def stream(mesh: RunningMesh, content: str) -> Seen:
    """Read a stream to its end."""
    seen = Seen()
    with mesh.http.stream("POST", "/v1/chat/completions", json=body(content, stream=True)) as response:
        assert response.status_code == httpx.codes.OK
        for line in response.iter_lines():
            if line.startswith(":"):
                seen.comments.append(time.monotonic())
            elif line == "data: [DONE]":
                seen.is_done = True
            elif line.startswith("data: "):
                seen.events.append((time.monotonic(), json.loads(line.removeprefix("data: "))))
    seen.ended_at = time.monotonic()
    return seen


def test_callers_of_a_route_that_is_lost_for_good(mesh: RunningMesh) -> None:
    """A stream lives on comments, and ends with one error frame in time; a whole answer becomes a 503."""
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(mesh.http.post, "/v1/chat/completions", json=body("go on for ever", max_tokens=4000))
        time.sleep(0.2)  # it is under way
        seen = stream(mesh, "this is lost")
        refused = whole.result()
    *tokens, (failed_at, failure) = seen.events
    lost_at = tokens[-1][0]
    assert "".join(event["choices"][0]["delta"].get("content", "") for _, event in tokens).strip() in (
        "one",
        "one two",
    )
    assert all(event["choices"][0]["finish_reason"] is None for _, event in tokens)

    waited_s = failed_at - lost_at
    assert FAILOVER_TIMEOUT_S - 0.1 <= waited_s <= FAILOVER_TIMEOUT_S + MARGIN_S
    comments = [at for at in seen.comments if lost_at < at < failed_at]
    assert len(comments) >= FAILOVER_TIMEOUT_S / KEEP_ALIVE_S / 2
    assert failure["error"]["code"] == "node_lost"
    assert failure["error"]["message"]
    assert not seen.is_done, "an answer that failed is not done"
    assert seen.ended_at - failed_at < MARGIN_S

    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "node_lost"
