"""What a session's draws depend on beside its cache: the tokens before, and the place in the grammar. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shard.history import TokenHistory
from shard.step_check import bad_step
from shared.messages import SamplingParams


class Matcher(Protocol):
    """One session's place in its grammar. For the compute thread; it may have a worker of its own."""

    def foresee(self, answer: Sequence[int]) -> None:
        """Begin to work out what may follow these tokens of the answer.

        Raises:
            StepFailed: `bad_step`: what work begun earlier has met.
        """
        ...

    def copy(self) -> Matcher:
        """One of its own, at the same place."""
        ...


NewMatcher = Callable[[SamplingParams], Matcher]
"""`Runner.new_matcher`."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Of a session whose sampling needs its history; the session's length says how much of it counts.

    Args:
        params: What the matcher was made for.
        history: The ids at the session's positions.
        matcher: There is one where there is a grammar.
    """

    params: SamplingParams
    history: TokenHistory
    matcher: Matcher | None

    def under(self, params: SamplingParams, new_matcher: NewMatcher) -> Drawing:
        """The same history, drawn from with other parameters."""
        if params == self.params:
            return self
        return Drawing(params, self.history, self._matcher_for(params, new_matcher))

    def copy(self, length: int, params: SamplingParams, new_matcher: NewMatcher) -> Drawing:
        """One of its own, of the first `length` positions, drawn from with these parameters."""
        matcher = self._matcher_for(params, new_matcher)
        if matcher is not None and matcher is self.matcher:
            matcher = matcher.copy()
        return Drawing(params, self.history.copy(length), matcher)

    def _matcher_for(self, params: SamplingParams, new_matcher: NewMatcher) -> Matcher | None:
        if (params.grammar, params.end_ids) == (self.params.grammar, self.params.end_ids):
            return self.matcher
        return _make_matcher(params, new_matcher)


def begin_drawing(params: SamplingParams | None, new_matcher: NewMatcher) -> Drawing | None:
    """For a session that begins; None where its draws need no history."""
    if params is None or not params.needs_history:
        return None
    return Drawing(params, TokenHistory(), _make_matcher(params, new_matcher))


def continue_drawing(held: Drawing | None, params: SamplingParams | None, new_matcher: NewMatcher) -> Drawing | None:
    """For a session that goes on, perhaps with other parameters.

    Raises:
        StepFailed: `bad_step` when the parameters need a history that the session was not given.
    """
    if params is None or not params.needs_history:
        return None
    if held is None:
        raise bad_step("sampling", "needs the tokens before, and the session's earlier steps did not carry them")
    return held.under(params, new_matcher)


def _make_matcher(params: SamplingParams, new_matcher: NewMatcher) -> Matcher | None:
    return new_matcher(params) if params.grammar else None
