"""Messages by value: what each field accepts, what is left out, what is ignored."""

from __future__ import annotations

import dataclasses

import pytest

from shared.errors import CACHE_MISS_REASONS, FrameError
from shared.fields import (
    BIAS_MAX,
    COUNT_MAX,
    COUNTERS_MAX,
    GRAMMAR_CHARS_MAX,
    LIST_ITEMS_MAX,
    NAME_CHARS_MAX,
    TEXT_CHARS_MAX,
)
from shared.layers import LayerRange
from shared.messages import (
    KIND_CHARS_MAX,
    LOGPROBS_MAX,
    PENALTY_MAX,
    SAMPLING_FIELDS,
    TEMPERATURE_MAX,
    CacheMiss,
    Error,
    Heartbeat,
    Hello,
    Message,
    NodeInfo,
    NodeStats,
    Refused,
    SamplingParams,
    Step,
    StepResult,
    UnknownKind,
    Welcome,
    decode_header,
    encode_header,
)
from shared.route import Hop, Route

STEP = Step(session="s", step_index=3, layers=LayerRange(0, 12), model="m")
STEP_HEADER: dict[str, object] = {"kind": "step", "session": "s", "step_index": 3, "layers": [0, 12], "model": "m"}
STATS = NodeStats(steps={"decode": 3}, misses={}, evictions={}, errors={})


def test_defaults_are_left_out_of_the_header():
    """A field that holds its default takes no bytes, and comes back as the default."""
    assert encode_header(STEP) == STEP_HEADER
    assert decode_header(STEP_HEADER) == STEP


def test_a_full_step_reads_back_equal():
    """Nested structures and optional fields survive the trip through JSON values."""
    route = Route((Hop("a", LayerRange(0, 12)), Hop("b", LayerRange(12, 24))))
    step = dataclasses.replace(
        STEP, cache="decode", past_len=9, new_len=2, output_len=0, sampling=SamplingParams(seed=5), route=route
    )
    assert decode_header(encode_header(step)) == step


def test_unknown_fields_are_ignored_at_every_depth():
    """What a newer peer adds to a message, or to what it nests, does not disturb an older one."""
    node = {"node": "n", "model": "m", "layers": [0, 1], "num_layers": 1, "colour": "red"}
    header = {"kind": "welcome", "version": 1, "peer": "n", "node": node, "extra": {"deep": [1, None]}}
    expected = Welcome(version=1, peer="n", node=NodeInfo(node="n", model="m", layers=LayerRange(0, 1), num_layers=1))
    assert decode_header(header) == expected


@pytest.mark.parametrize("kind", ["teleport", "", "STEP", "k" * 5000])
def test_an_unknown_kind_is_named_and_clipped(kind: str):
    """The error repeats no more of it than `KIND_CHARS_MAX`."""
    with pytest.raises(UnknownKind) as caught:
        decode_header({"kind": kind})
    assert caught.value.kind == kind[:KIND_CHARS_MAX]
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("header", [{}, {"kind": None}, {"kind": 3}, {"kind": ["step"]}])
def test_a_header_without_a_kind_is_a_bad_message(header: dict[str, object]):
    """Absent or of another type is not unknown: it is malformed."""
    with pytest.raises(FrameError) as caught:
        decode_header(header)
    assert caught.value.code == "bad_message"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", ""),
        ("session", "x" * (NAME_CHARS_MAX + 1)),
        ("session", None),
        ("session", 7),
        ("session", ["s"]),
        ("step_index", -1),
        ("step_index", 1.0),
        ("step_index", True),
        ("step_index", "1"),
        ("step_index", COUNT_MAX + 1),
        ("step_index", 1e300),
        ("cache", "append"),
        ("cache", ["decode"]),
        ("cache", {}),
        ("layers", [0]),
        ("layers", [0, 1, 2]),
        ("layers", [1, 1]),
        ("layers", [2, 1]),
        ("layers", [-1, 1]),
        ("layers", "0:12"),
        ("layers", {"0": 12}),
        ("output_len", -1),
        ("sampling", []),
        ("sampling", {"temperature": -0.1}),
        ("sampling", {"temperature": TEMPERATURE_MAX + 1}),
        ("sampling", {"temperature": float("nan")}),
        ("sampling", {"temperature": float("inf")}),
        ("sampling", {"temperature": 10**400}),
        ("sampling", {"temperature": False}),
        ("sampling", {"top_p": 1.01}),
        ("sampling", {"seed": -1}),
        ("route", []),
        ("route", [["a", 1, 2]]),
        ("route", [["a", 0, 1], ["b", 2, 3]]),
        ("route", [["a", 0]]),
        ("route", [[1, 0, 1]]),
        ("route", [["", 0, 1]]),
        ("route", [["a", i, i + 1] for i in range(LIST_ITEMS_MAX + 1)]),
    ],
)
def test_a_wrong_value_names_its_field(field: str, value: object):
    """Every wrong type, range or length is `bad_message` and says which field it was, nested ones included."""
    with pytest.raises(FrameError) as caught:
        decode_header({**STEP_HEADER, field: value})
    assert caught.value.code == "bad_message"
    nested = next(iter(value)) if isinstance(value, dict) and value else field
    assert caught.value.fields["field"] in {field, nested}


@pytest.mark.parametrize("field", ["session", "step_index", "layers", "model"])
def test_a_missing_field_is_named(field: str):
    """Required fields have no default to fall back to."""
    with pytest.raises(FrameError, match=rf"Step\.{field} is missing") as caught:
        decode_header({name: value for name, value in STEP_HEADER.items() if name != field})
    assert caught.value.code == "bad_message"


@pytest.mark.parametrize(
    "message",
    [
        dataclasses.replace(STEP, session="x" * NAME_CHARS_MAX, step_index=COUNT_MAX),
        StepResult(session="s", step_index=0, token_ids=tuple(range(LIST_ITEMS_MAX)), text="é" * TEXT_CHARS_MAX),
        Heartbeat(seq=0, stats=dataclasses.replace(STATS, misses={f"r{i}": i for i in range(COUNTERS_MAX)})),
        dataclasses.replace(STEP, sampling=SamplingParams(temperature=TEMPERATURE_MAX, top_p=0.0, seed=COUNT_MAX)),
    ],
)
def test_values_exactly_at_their_limits_pass(message: Message):
    """A limit is the largest value allowed."""
    assert decode_header(encode_header(message)) == message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (dataclasses.replace(STEP, session="x" * (NAME_CHARS_MAX + 1)), r"Step\.session"),
        (dataclasses.replace(STEP, step_index=-1), r"Step\.step_index"),
        (dataclasses.replace(STEP, sampling=SamplingParams(logprobs=LOGPROBS_MAX + 1)), r"SamplingParams\.logprobs"),
        (
            dataclasses.replace(STEP, sampling=SamplingParams(grammar="x" * (GRAMMAR_CHARS_MAX + 1))),
            r"SamplingParams\.grammar",
        ),
        (
            dataclasses.replace(STEP, sampling=SamplingParams(logit_bias=((1, BIAS_MAX * 2),))),
            r"SamplingParams\.logit_bias",
        ),
        (
            dataclasses.replace(STEP, sampling=SamplingParams(presence_penalty=-PENALTY_MAX - 1)),
            r"SamplingParams\.presence_penalty",
        ),
        (dataclasses.replace(STEP, sampling=SamplingParams(temperature=float("nan"))), r"SamplingParams\.temperature"),
        (StepResult(session="s", step_index=0, token_ids=(-1,)), r"StepResult\.token_ids"),
        (StepResult(session="s", step_index=0, text="x" * (TEXT_CHARS_MAX + 1)), r"StepResult\.text"),
        (StepResult(session="s", step_index=0, token_ids=(0,) * (LIST_ITEMS_MAX + 1)), r"StepResult\.token_ids"),
        (Heartbeat(seq=0, stats=dataclasses.replace(STATS, misses={"x": -1})), r"NodeStats\.misses"),
        (
            Heartbeat(
                seq=0, stats=dataclasses.replace(STATS, errors=dict.fromkeys(map(str, range(COUNTERS_MAX + 1)), 0))
            ),
            r"NodeStats\.errors",
        ),
        (CacheMiss(session="s", step_index=0, reason="gone"), r"CacheMiss\.reason"),  # type: ignore[arg-type]
    ],
)
def test_what_no_receiver_would_accept_is_not_encoded(message: Message, field: str):
    """Our own fault shows where it is made, instead of as a link that the peer closes."""
    with pytest.raises(ValueError, match=field):
        encode_header(message)


@pytest.mark.parametrize("text", ["x" * 100_000, "lone \ud800 surrogate", ""])
def test_sentences_for_people_never_end_a_link(text: str):
    """Another library's exception text is clipped and made encodable instead of being refused by the peer."""
    for message in (Error(code="bad_step", message=text), Refused(code="unauthorized", message=text)):
        decoded = decode_header(encode_header(message))
        assert isinstance(decoded, Error | Refused)
        assert decoded.message == text[:TEXT_CHARS_MAX].replace("\ud800", "?")


@pytest.mark.parametrize("reason", CACHE_MISS_REASONS)
def test_every_miss_reason_travels(reason: str):
    """All reasons of the design are on the wire, no other is."""
    header = {"kind": "cache_miss", "session": "s", "step_index": 1, "reason": reason}
    assert encode_header(decode_header(header)) == header


def test_what_is_asked_for_is_what_a_node_announces_to_honour():
    """The names that a gateway compares are those of the fields on the wire; defaults ask for nothing."""
    asked = SamplingParams(seed=3, top_k=5, logprobs=0).asked_fields()
    assert asked == {"seed", "top_k", "logprobs"}
    assert asked <= set(SAMPLING_FIELDS)


@pytest.mark.parametrize(
    ("sampling", "needs"),
    [
        (SamplingParams(seed=1, top_k=4, min_p=0.1, logprobs=3, logit_bias=((1, 2.0),), banned_ids=(4,)), False),
        (SamplingParams(grammar="{}"), True),
        (SamplingParams(min_tokens=1), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(frequency_penalty=-0.1), True),
        (SamplingParams(presence_penalty=0.1), True),
    ],
)
def test_only_what_depends_on_the_history_asks_for_it(sampling: SamplingParams, needs: bool):
    """A plain step carries no ids to the last hop."""
    assert sampling.needs_history is needs


def test_a_node_knows_its_place():
    """First and last follow from the range and the model's depth."""
    nodes = [NodeInfo(node="n", model="m", layers=LayerRange(a, b), num_layers=4) for a, b in ((0, 2), (2, 4), (0, 4))]
    assert [(node.is_first, node.is_last) for node in nodes] == [(True, False), (False, True), (True, True)]


def test_a_token_is_not_shown_by_repr():
    """A message in a log line or a traceback must not give the mesh token away."""
    assert "secret" not in repr(Hello(versions=(1,), role="gateway", peer="g", token="secret"))
