"""Rules of the gateway, each broken in one way: a simulation that finds none of these finds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from gateway import choice_maker
from gateway.admission import Admission
from gateway.journal import Journal, TensorInputs
from gateway.lifecycle import Lifecycle
from gateway.node_link import NodeLink
from gateway.session import HopState
from gateway.waits import Waits
from shared.messages import NodeInfo

Break = Callable[[], Any]
"""Makes a context manager under which one rule is broken."""


def _replaced(owner: type, name: str, broken: Callable[..., Any]) -> Break:
    return lambda: patch.object(owner, name, broken)


def _late_answers_are_taken(waits: Waits, session: str, _step_index: int, _epoch: int) -> Any:
    return next((wait for wait in waits if wait.step.session == session and not wait.answer.done()), None)


def _a_moved_hop_is_not_prefilled(hop: HopState, node: NodeInfo) -> None:
    hop.node, hop.needs_token_ids = node.node, node.needs_token_ids


def _a_move_gives_no_place_back(admission: Admission, session: str, _source: str | None, target: NodeInfo) -> None:
    admission._reserved.setdefault(target.node, {})[session] = 0


def _a_dropped_journal_is_replayed(inputs: TensorInputs, length: int) -> bool:
    return inputs.length == length


def _the_budget_is_not_kept(journal: Journal, nbytes: int) -> None:
    journal.nbytes += nbytes


def _only_the_first_hop_is_told(lifecycle: Lifecycle, generation: Any, outcome: Any) -> None:
    generation.visited = dict(list(generation.visited.items())[:1])
    _end(lifecycle, generation, outcome)


def _what_ends_is_not_kept_for_a_lost_link(link: NodeLink, message: Any) -> None:
    if link.is_open:
        link._outbox.put(message)


def _a_replay_goes_on_from_what_was_held(hop: HopState) -> None:
    pass


def _a_fork_goes_where_it_has_no_place(_leader: Any, _session: str) -> bool:
    return True


def _places_are_not_counted(_admission: Admission, _node: NodeInfo, *_args: Any, **_kwargs: Any) -> bool:
    return True


_end = Lifecycle.end

MUTATIONS: dict[str, Break] = {
    "late answers are taken": _replaced(Waits, "_find", _late_answers_are_taken),
    "a moved hop is not prefilled": _replaced(HopState, "place", _a_moved_hop_is_not_prefilled),
    "a move gives no place back": _replaced(Admission, "move", _a_move_gives_no_place_back),
    "a dropped journal is replayed": _replaced(TensorInputs, "holds", _a_dropped_journal_is_replayed),
    "the journal's budget is not kept": _replaced(Journal, "count", _the_budget_is_not_kept),
    "only the first hop is told of an end": _replaced(Lifecycle, "end", _only_the_first_hop_is_told),
    "ends are lost with a link": _replaced(NodeLink, "post", _what_ends_is_not_kept_for_a_lost_link),
    "a replay goes on from what was held": _replaced(HopState, "forget", _a_replay_goes_on_from_what_was_held),
    "a fork goes where it has no place": lambda: patch.object(
        choice_maker, "_follow", _a_fork_goes_where_it_has_no_place
    ),
    "places are not counted": _replaced(Admission, "has_room", _places_are_not_counted),
}
"""By what is broken."""


@contextmanager
def broken(name: str) -> Iterator[None]:
    """The gateway with one rule broken."""
    with MUTATIONS[name]():
        yield
