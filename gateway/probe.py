"""What a session asks of its last hop beside a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shared.messages import Pooling
from shared.tensor_spec import WireTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one step asks: fields of `shared.messages.Step`, and tensors that travel with it."""

    score: int | None = None
    pool: Pooling | None = None
    tensors: Mapping[str, WireTensor] = field(default_factory=dict)


class Probe(Protocol):
    """Collects answers by position, over the steps of one session.

    Steps follow each other without a gap; one that starts at 0 begins anew, as a rebuilt hop does, and what
    was taken before counts once all the same.
    """

    def ask(self, start: int, new_len: int) -> Asked | None:
        """What a step over positions ``[start, start + new_len)`` asks; None for nothing."""
        ...

    def take(self, start: int, new_len: int, tensors: Mapping[str, WireTensor]) -> None:
        """Take in the answer to what was asked.

        Raises:
            StepFailed: `bad_answer`: the tensors are not what was asked for; nothing was taken in.
        """
        ...
