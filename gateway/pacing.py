"""How long a node may take: deadlines derived from what its steps have taken so far.

A deadline is no guess about the network: it is what this node usually needs for a step of this size,
several times over, plus a floor. A node that has not been measured yet gets a generous default. How long
a step *waited* at the node, behind other sessions, is no part of its duration here, and a node that
completes other steps meanwhile is alive: `gateway.node_link` lets the wait begin anew with each sign
of progress.
"""

from __future__ import annotations

from dataclasses import dataclass

ALLOWANCE_FLOOR_S = 2.0
"""On top of every expected duration: scheduling, garbage collection, a cold cache, a busy neighbour."""
ALLOWANCE_FACTOR = 4.0
"""A step may take this many times what is usual before its node is called stalled."""
UNKNOWN_ALLOWANCE_S = 60.0
"""For a process that has not answered a step yet: weights are read from disk, kernels are compiled."""
SMOOTHING = 0.2
"""Weight of the newest duration in the moving average."""
LINK_BYTES_PER_S_MIN = 1_000_000
"""The slowest link that is not taken for a dead one: 8 Mbit/s."""


@dataclass(slots=True)
class Pace:
    """Moving averages of one node process; seconds.

    Args:
        decode_s: A step of one position.
        prefill_s_per_token: Steps of several positions, per position.
        prefill_s: Steps of several positions, as a whole: an upper bound for one position.
    """

    decode_s: float | None = None
    prefill_s_per_token: float | None = None
    prefill_s: float | None = None

    def record(self, new_len: int, seconds: float) -> None:
        """Take in what a step of `new_len` positions took, without its time in the node's queue."""
        if new_len == 1:
            self.decode_s = _smoothed(self.decode_s, seconds)
            return
        self.prefill_s = _smoothed(self.prefill_s, seconds)
        self.prefill_s_per_token = _smoothed(self.prefill_s_per_token, seconds / new_len)

    def expected_s(self, new_len: int) -> float | None:
        """What a step of `new_len` positions should take; None before the first measurement."""
        one_s = self.decode_s if self.decode_s is not None else self.prefill_s
        if one_s is None or new_len == 1:
            return one_s
        per_token_s = self.prefill_s_per_token if self.prefill_s_per_token is not None else one_s
        return max(one_s, per_token_s * new_len)

    def allowance_s(self, new_len: int, payload_bytes: int = 0, *, patience: float = 1.0) -> float:
        """How long to wait for a step of `new_len` positions that carries `payload_bytes`.

        Args:
            new_len: Positions.
            payload_bytes: Of its tensors.
            patience: Multiplies what was derived from measurements, which may have been too short. The
                default of a process that was never measured is generous already.
        """
        expected_s = self.expected_s(new_len)
        if expected_s is None:
            return UNKNOWN_ALLOWANCE_S
        usual_s = ALLOWANCE_FLOOR_S + ALLOWANCE_FACTOR * expected_s + payload_bytes / LINK_BYTES_PER_S_MIN
        return patience * usual_s


def _smoothed(average: float | None, value: float) -> float:
    return value if average is None else average + SMOOTHING * (value - average)
