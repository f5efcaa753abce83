"""What can happen to a step at a scripted node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import CacheMissReason
from shared.messages import Message, Step
from shared.tensor_spec import WireTensor


@dataclass(frozen=True)
class Miss:
    """Answer with a cache miss, and hold the session no longer."""

    reason: CacheMissReason = "evicted"


@dataclass(frozen=True)
class Fail:
    """Answer with an error."""

    code: str


@dataclass(frozen=True)
class Slow:
    """Compute for so long."""

    seconds: float


@dataclass(frozen=True)
class Late:
    """Compute at once, but let the answer travel for so long."""

    seconds: float


@dataclass(frozen=True)
class Drop:
    """Never answer; `applied` says whether the step is computed all the same."""

    applied: bool = False


@dataclass(frozen=True)
class Cut:
    """Lose the link instead of answering; `applied` says whether the step is computed before."""

    applied: bool = False


@dataclass(frozen=True)
class Crash:
    """Lose the link and every session; come back as a new process after so long (None: never)."""

    back_after_s: float | None = 0.0


@dataclass(frozen=True)
class Mangle:
    """Change the answer."""

    change: Callable[[Message, dict[str, WireTensor]], tuple[Message, dict[str, WireTensor]]]


@dataclass(frozen=True)
class Twice:
    """Answer, and give the same answer again after so long."""

    seconds: float


@dataclass(frozen=True)
class Again:
    """The step reaches the node twice."""


@dataclass(frozen=True)
class Stray:
    """Answers to steps that nobody waits for come before the right one."""


@dataclass(frozen=True)
class Noise:
    """Bytes that are no frame come instead of the answer."""


Fate = Miss | Fail | Slow | Late | Drop | Cut | Crash | Mangle | Twice | Again | Stray | Noise
Script = Callable[[Step, int], Fate | None]
"""What happens to a step, given it and its number among those that this node has received."""


def nth(number: int, *fates: Fate) -> Script:
    """The step of this number, counted from 0, and those after it meet these fates; the others are served."""
    return lambda _step, count: fates[count - number] if 0 <= count - number < len(fates) else None
