"""Which waiting steps run next."""

from __future__ import annotations

import pytest

from shard.step_queue import LINKS_REMEMBERED_MAX, SHORT_POSITIONS_MAX, SHORT_STEPS_PER_LONG, QueuedStep, StepQueue
from shared.errors import StepFailed
from shared.layers import LayerRange
from shared.messages import Step
from shared.tensor_spec import WireTensor

LONG = SHORT_POSITIONS_MAX + 1


def item(session: str, new_len: int = 1, *, link: object = None, nbytes: int = 0) -> QueuedStep:
    """A waiting step."""
    step = Step(session=session, step_index=0, new_len=new_len, layers=LayerRange(0, 1), model="m")
    tensors = {"x": WireTensor("u8", (nbytes,), memoryview(bytes(nbytes)))} if nbytes else {}
    return QueuedStep(step, tensors, link, 0.0)


def taken(queue: StepQueue, steps_max: int = 1) -> list[str]:
    """The sessions of the steps taken."""
    return [each.step.session for each in queue.take(steps_max)]


def test_steps_run_in_order_of_arrival() -> None:
    """Among equals the first comes first; an empty queue gives an empty list."""
    queue = StepQueue()
    for session in ("a", "b", "c"):
        queue.offer(item(session))
    assert taken(queue, 2) == ["a", "b"]
    assert taken(queue, 2) == ["c"]
    assert taken(queue, 2) == []


def test_decode_passes_prefill() -> None:
    """A short step goes before a long one that came first."""
    queue = StepQueue()
    queue.offer(item("prefill", LONG))
    queue.offer(item("decode"))
    assert taken(queue) == ["decode"]
    assert taken(queue) == ["prefill"]


def test_prefill_is_not_starved() -> None:
    """After a named number of short steps a waiting long one runs, and the count begins again."""
    queue = StepQueue()
    queue.offer(item("prefill", LONG))
    queue.offer(item("prefill2", LONG))
    order = []
    for number in range(2 * SHORT_STEPS_PER_LONG + 2):
        queue.offer(item(f"d{number}"))
        order += taken(queue)
    assert order[SHORT_STEPS_PER_LONG] == "prefill"
    assert order[2 * SHORT_STEPS_PER_LONG + 1] == "prefill2"


def test_short_steps_owe_nothing_when_no_long_one_waits() -> None:
    """A prefill that arrives later does not pass the decode steps at once."""
    queue = StepQueue()
    for number in range(SHORT_STEPS_PER_LONG * 2):
        queue.offer(item(f"d{number}"))
        taken(queue)
    queue.offer(item("prefill", LONG))
    queue.offer(item("decode"))
    assert taken(queue) == ["decode"]


def test_steps_of_a_session_keep_their_order() -> None:
    """A session's short last chunk does not pass its long first one, nor later ones each other."""
    queue = StepQueue()
    first, last, after = item("s", LONG), item("s", 2), item("s", 1)
    for each in (first, last, after):
        queue.offer(each)
    assert [queue.take(1)[0] for _ in range(3)] == [first, last, after]
    queue.offer(item("s", 1))
    queue.offer(item("t", LONG))
    assert taken(queue) == ["s"]


def test_one_list_holds_one_step_of_a_session() -> None:
    """Steps of one session depend on each other, so they never run together."""
    queue = StepQueue()
    for session in ("a", "a", "b"):
        queue.offer(item(session))
    assert taken(queue, 3) == ["a", "b"]
    assert taken(queue, 3) == ["a"]


def test_number_of_waiting_steps_is_bounded() -> None:
    """One step too many is refused, naming the limit; room made is room again."""
    queue = StepQueue(steps_max=2)
    queue.offer(item("a"))
    queue.offer(item("b", LONG))
    with pytest.raises(StepFailed, match="limit is 2 steps") as caught:
        queue.offer(item("c"))
    assert caught.value.code == "queue_full"
    queue.take(1)
    queue.offer(item("c"))


def test_bytes_of_waiting_steps_are_bounded() -> None:
    """Waiting tensors are counted while they wait, whichever way they leave."""
    queue = StepQueue(bytes_max=100)
    queue.offer(item("a", nbytes=60))
    with pytest.raises(StepFailed, match="100 bytes"):
        queue.offer(item("b", nbytes=60))
    queue.take(1)
    queue.offer(item("b", nbytes=60))
    queue.drop(lambda _: True)
    queue.offer(item("c", nbytes=100))
    assert len(queue) == 1


def test_dropping_removes_what_nobody_wants() -> None:
    """The steps of a link that is gone leave both lanes; the others stay in order."""
    queue, gone = StepQueue(), object()
    for session, new_len, link in (("a", 1, gone), ("b", LONG, gone), ("c", 1, None), ("b", 1, None)):
        queue.offer(item(session, new_len, link=link))
    dropped = queue.drop(lambda each: each.link is gone)
    assert [each.step.session for each in dropped] == ["a", "b"]
    assert taken(queue, 4) == ["c", "b"]


def test_first_cancel_gives_the_code() -> None:
    """A step cancelled for one reason keeps it."""
    each = item("a")
    each.cancel("stale_epoch")
    each.cancel("cancelled")
    assert each.cancelled
    assert each.cancel_code == "stale_epoch"


@pytest.mark.parametrize("new_len", [1, LONG])
def test_gateways_take_turns(new_len: int) -> None:
    """One gateway's many steps do not stand before another's few; each one's own keep their order."""
    queue = StepQueue()
    one, two = object(), object()
    for session in ("a1", "a2", "a3"):
        queue.offer(item(session, new_len, link=one))
    for session in ("b1", "b2"):
        queue.offer(item(session, new_len, link=two))
    assert taken(queue, 5) == ["a1", "b1", "a2", "b2", "a3"]


def test_whoever_was_served_last_waits_for_the_other() -> None:
    """Turns are remembered while a gateway has nothing waiting."""
    queue = StepQueue()
    one, two = object(), object()
    queue.offer(item("a1", link=one))
    assert taken(queue) == ["a1"]
    queue.offer(item("a2", link=one))
    queue.offer(item("b1", link=two))
    assert taken(queue, 2) == ["b1", "a2"]


def test_links_that_are_gone_are_forgotten() -> None:
    """However many gateways come and go, few turns are remembered."""
    queue = StepQueue()
    links = [object() for _ in range(LINKS_REMEMBERED_MAX * 3)]
    for number, link in enumerate(links):
        queue.offer(item(str(number), link=link))
        queue.take(1)
    assert len(queue._served_at) == LINKS_REMEMBERED_MAX
