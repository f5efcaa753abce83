"""One answer: where it ends, why, what is counted, and that chunking never changes its text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Answer
from gateway.detokenizer import ByteDetokenizer
from gateway.generation_request import Token, TokenLogprobs
from gateway.logprobs import LOGPROB_MIN
from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.parsing.parser import PlainParser
from gateway.stop import StopMatcher
from gateway.tokenizer import ChatTokenizer

EOS = 2


def create_answer(stops: tuple[str, ...] = (), max_tokens: int = 100) -> Answer:
    """An answer whose token ids are bytes."""
    detokenizer = ByteDetokenizer(lambda token_id: bytes([token_id]))
    return Answer(detokenizer, PlainParser(), StopMatcher(stops), eos_ids={EOS, 7}, max_tokens=max_tokens)


def push(answer: Answer, token_id: int) -> str:
    """The content that a token adds."""
    return "".join(event.text for event in answer.push(Token(token_id)).events if isinstance(event, Content))


def push_all(answer: Answer, ids: bytes) -> str:
    """Push up to the end and return the text."""
    text = ""
    for token_id in ids:
        text += push(answer, token_id)
        if answer.finish_reason is not None:
            break
    return text


@pytest.mark.parametrize("eos", [EOS, 7])
def test_any_end_token_ends_the_answer_and_is_counted_but_not_shown(eos: int):
    """Models have several end tokens; each of them means `stop`."""
    answer = create_answer()
    assert push_all(answer, b"ab" + bytes([eos]) + b"c") == "ab"
    assert (answer.finish_reason, answer.completion_tokens) == ("stop", 3)


def test_the_last_token_allowed_ends_the_answer_with_length():
    """`length` with exactly as many tokens as were asked for."""
    answer = create_answer(max_tokens=2)
    assert push_all(answer, b"abc") == "ab"
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 2)


def test_an_end_token_as_the_last_token_allowed_means_stop():
    """The model had finished by itself."""
    answer = create_answer(max_tokens=2)
    push_all(answer, bytes([97, EOS]))
    assert answer.finish_reason == "stop"


def test_a_stop_string_on_the_last_token_allowed_means_stop():
    """The stop string was complete, so nothing was cut."""
    answer = create_answer(("bc",), max_tokens=3)
    assert push_all(answer, b"abc") == "a"
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("end", [bytes([EOS]), b""])
def test_held_back_text_comes_out_at_the_end(end: bytes):
    """The beginning of a stop string that never came belongs to the answer."""
    answer = create_answer(("bcd",), max_tokens=4 if end else 3)
    assert push_all(answer, b"abc" + end) == "abc"


def test_a_character_that_the_limit_cuts_is_dropped():
    """Neither half of it nor a replacement is shown, streaming or not."""
    answer = create_answer(max_tokens=4)
    assert push_all(answer, b"a" + "\U0001f600".encode()) == "a"
    assert answer.finish_reason == "length"


def test_a_finished_answer_takes_no_more():
    """Pushing on would count tokens that nobody asked for."""
    answer = create_answer(max_tokens=1)
    push(answer, 97)
    with pytest.raises(ValueError, match="finished"):
        push(answer, 98)


@given(
    ids=st.lists(st.integers(3, 399), min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="ethnr \n", min_size=1, max_size=3), max_size=3),
)
def test_the_text_is_the_decoded_text_before_the_first_stop_string(
    text_tokenizer: Callable[[str], ChatTokenizer], ids: list[int], stops: list[str]
):
    """Whatever tokens come, what is shown is a prefix of the decoded text and holds no stop string."""
    tokenizer = text_tokenizer("byte_level")
    answer = Answer(
        tokenizer.detokenizer([74]),
        PlainParser(),
        StopMatcher(stops),
        eos_ids=tokenizer.eos_ids,
        max_tokens=len(ids),
    )
    text = ""
    for token_id in ids:
        text += push(answer, token_id)
        if answer.finish_reason is not None:
            break
    whole = tokenizer.decode([74, *ids])[len(tokenizer.decode([74])) :]
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert answer.finish_reason == ("stop" if any(stop in whole for stop in stops) else "length")


class ScriptedParser:
    """Letters are content, digits reasoning, ``(`` begins a call, ``.`` its arguments."""

    special_tokens: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.calls = -1

    def push(self, text: str) -> list[Event]:
        """One event per character."""
        return [self._event(char) for char in text]

    def finish(self) -> list[Event]:
        """The end shows."""
        return [Content("!")]

    def _event(self, char: str) -> Event:
        if char == "(":
            self.calls += 1
            return ToolCallBegin(self.calls, "f")
        if char == ".":
            return ToolCallArguments(self.calls, "{}")
        return Reasoning(char) if char.isdigit() else Content(char)


def create_parsed(**options: object) -> Answer:
    """An answer with that parser, whose token ids are bytes."""
    detokenizer = ByteDetokenizer(lambda token_id: bytes([token_id]))
    values = {"eos_ids": {EOS}, "max_tokens": 100, "mint_id": iter(["call_a", "call_b"]).__next__, **options}
    stop = StopMatcher(values.pop("stops", ()))  # type: ignore[arg-type]
    return Answer(detokenizer, ScriptedParser(), stop, **values)  # type: ignore[arg-type]


def test_calls_get_ids_and_make_the_reason():
    """Content, reasoning and calls are kept apart, and the transcript is what was shown."""
    answer = create_parsed()
    push_all(answer, b"a1b(.(." + bytes([EOS]))
    transcript = answer.transcript
    assert (transcript.content, transcript.reasoning) == ("ab!", "1")
    assert [(call.id, call.name, call.arguments) for call in transcript.tool_calls] == [
        ("call_a", "f", "{}"),
        ("call_b", "f", "{}"),
    ]
    assert (answer.finish_reason, answer.reasoning_tokens, answer.completion_tokens) == ("tool_calls", 1, 8)


def test_length_beats_tool_calls():
    """A call that the limit may have cut must not look complete."""
    answer = create_parsed(max_tokens=2)
    push_all(answer, b"(.")
    assert answer.finish_reason == "length"


def test_a_named_call_is_no_news():
    """The caller chose the function, so the reason is `stop`, as OpenAI has it."""
    answer = create_parsed(names_calls=False)
    push_all(answer, b"(." + bytes([EOS]))
    assert answer.finish_reason == "stop"


def test_stop_strings_are_looked_for_in_content_alone():
    """None tears reasoning or a call apart, and what was held back comes out before a call."""
    answer = create_parsed(stops=("11", "xy", "{}"))
    push_all(answer, b"11x(.xyz" + bytes([EOS]))
    assert answer.transcript.reasoning == "11"
    assert answer.transcript.content == "x"
    assert answer.transcript.tool_calls[0].arguments == "{}"
    assert (answer.finish_reason, answer.stop_reason, answer.completion_tokens) == ("stop", "xy", 7)


def test_a_stop_token_of_the_callers_own_is_named():
    """An end token of the model's is not."""
    answer = create_parsed(eos_ids={EOS, 7}, stop_ids={7})
    push_all(answer, b"a" + bytes([7]))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 7)


def test_stop_strings_wait_for_the_least_number_of_tokens():
    """Before `min_tokens` nothing is looked for."""
    answer = create_parsed(stops=("a",), min_tokens=3)
    push_all(answer, b"aaba")
    assert answer.transcript.content == "aab"


def test_log_probabilities_go_with_every_token_that_shows_or_not():
    """A token that a parser hides has one too."""

    def spell(token_id: int) -> tuple[str, bytes]:
        return chr(token_id), bytes([token_id])

    answer = create_parsed(spell=spell)
    for token_id in (b"a"[0], b"("[0], EOS):
        answer.push(Token(token_id, logprobs=TokenLogprobs(-0.5, ((98, -0.25),))))
    entries = answer.transcript.logprobs
    assert [entry.token.data for entry in entries] == [b"a", b"(", bytes([EOS])]
    assert [(top.text, top.logprob) for top in entries[0].top] == [("b", -0.25)]


def test_a_call_too_many_ends_the_answer_after_the_one_before():
    """Where calls may not come together; nothing of the second is shown."""
    answer = create_parsed(calls_max=1)
    push_all(answer, b"a(.b(.")
    assert [call.id for call in answer.transcript.tool_calls] == ["call_a"]
    assert (answer.transcript.content, answer.finish_reason, answer.completion_tokens) == ("ab", "tool_calls", 5)


def test_what_json_cannot_say_of_a_log_probability_is_bounded():
    """A token that cannot come has minus infinity."""
    answer = create_parsed(spell=lambda token_id: (chr(token_id), bytes([token_id])))
    answer.push(Token(97, logprobs=TokenLogprobs(-0.5, ((98, float("-inf")),))))
    (entry,) = answer.transcript.logprobs
    assert (entry.token.logprob, entry.top[0].logprob) == (-0.5, LOGPROB_MIN)
