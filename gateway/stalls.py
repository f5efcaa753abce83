"""Which steps have waited too long at a node that goes on answering heartbeats."""

from __future__ import annotations

import structlog

from gateway.known_node import KnownNode
from gateway.liveness import Liveness
from gateway.waits import Waits
from shared.errors import DeadlineExceeded

NEIGHBOUR_STEP_TOKENS = 256
"""Size of the steps that other gateways are assumed to have queued at a busy node."""

log = structlog.stdlib.get_logger(__name__)


def fail_stalled(waits: Waits, node: KnownNode, liveness: Liveness) -> None:
    """End the waits whose node has made no progress for longer than it may."""
    if not waits:
        return
    allowance_s = max(wait.allowance_s for wait in waits)
    if node.stats is not None and node.stats.queued_steps >= len(waits):
        # All our steps are queued, so what the node computes is somebody else's.
        allowance_s = max(allowance_s, node.pace.allowance_s(NEIGHBOUR_STEP_TOKENS))
    for wait in waits:
        if liveness.is_stalled(wait.asked_at_attentive, allowance_s):
            log.warning("step.stalled", url=node.url, session=wait.step.session, allowance_s=round(allowance_s, 2))
            wait.fail(DeadlineExceeded("step_stalled", f"{node.url} made no progress", url=node.url))
