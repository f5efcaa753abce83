"""The parsers against the fixtures of `canitoolcall`, a suite for parsers of tool calls and reasoning."""

from __future__ import annotations

from canitoolcall.results import Status

from tests.support.parser_conformance import FAMILIES_OF, judge_all
from tests.support.parser_docs import PARSERS_PAGE, parsers_page

WHOLE_PASSES_MIN = 467
"""Strict passes, of 469, when calls are given whole. One fixture contradicts two others about white space, and one
expects a complete call to be dropped because a later one breaks off."""

STREAMED_PASSES_MIN = 441
"""Strict passes when calls are given as they arrive. The rest are calls that break off, or turn out malformed, after
their name was given."""


def passes(*, whole_calls: bool) -> int:
    """Return how many fixtures pass in every cut, white space included."""
    return sum(case.status is Status.PASS for case in judge_all(whole_calls=whole_calls))


def test_whole_calls_pass_as_many_fixtures_as_ever():
    """A change must not lose a format."""
    assert passes(whole_calls=True) >= WHOLE_PASSES_MIN


def test_streamed_calls_pass_as_many_fixtures_as_ever():
    """Giving arguments as they arrive costs only what the suite says of calls that break off."""
    assert passes(whole_calls=False) >= STREAMED_PASSES_MIN


def test_every_case_that_fails_only_when_streamed_breaks_off_or_is_malformed():
    """Nothing else may differ between the two ways to give calls."""
    whole = {case.fixture.id for case in judge_all(whole_calls=True) if case.status is Status.PASS}
    for case in judge_all(whole_calls=False):
        if case.status is not Status.PASS and case.fixture.id in whole:
            assert {"truncated", "malformed"} & set(case.fixture.tags), case.fixture.id


def test_no_entry_of_the_table_of_models_is_unused():
    """Every beginning of a name is one that a fixture's model has."""
    models = {case.fixture.reference_model for case in judge_all(whole_calls=True)}
    assert all(any(model.startswith(start) for model in models) for start in FAMILIES_OF)


def test_the_page_of_parsers_is_current():
    """docs/parsers.md says what these tests found."""
    assert PARSERS_PAGE.read_text() == parsers_page(), "run: python -m tests.support.parser_docs > docs/parsers.md"
