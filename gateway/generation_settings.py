"""Bounds of what a gateway generates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """Bounds of all generations of a gateway.

    Args:
        prefill_chunk_tokens: The most positions that enter a hop with one step.
        failover_timeout_s: How long a hop may be without any node, however free, before its generation ends.
        route_wait_s: How long a new request waits for a route that is not complete.
        queue_max: How many generations wait for a place; more are refused.
        queue_timeout_s: How long one waits for a place.
        journal_bytes_max: Budget of all journals together.
    """

    prefill_chunk_tokens: int = 256
    failover_timeout_s: float = 30.0
    route_wait_s: float = 5.0
    queue_max: int = 64
    queue_timeout_s: float = 120.0
    journal_bytes_max: int = 1 << 30
