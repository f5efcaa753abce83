"""Writes docs/parsers.md from the families and the conformance suite: ``python -m tests.support.parser_docs``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from canitoolcall import __version__ as suite_version
from canitoolcall.results import Status

from gateway.parsing.families import FAMILIES, Family
from tests.support.parser_conformance import Case, families_of, judge_all

PARSERS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "parsers.md"
DETAIL_CHARS_MAX = 200

_HEAD = """\
# Parsers of model output

A model writes its reasoning and its tool calls into its text, each family in a format of its own.
[`gateway/parsing`](../gateway/parsing) turns that text, piece by piece, into events: content, reasoning, the beginning
of a call, more of its arguments. [`choice.py`](../gateway/parsing/choice.py) tells a model's families by its chat
template, [`families.py`](../gateway/parsing/families.py) lists them and makes the parser for an answer.

This page is written by `python -m tests.support.parser_docs > docs/parsers.md`, and a test fails when it is stale.

## How it works

Each format is a grammar: a generator that reads from [`source.py`](../gateway/parsing/source.py) as if the whole text
were there, and is suspended where the text so far does not decide what comes next. It never sees where one piece ends
and the next begins, so the events, joined, are the same for every cut. What is held back is the beginning of a
marker, a value whose type only its end tells, and arguments that come before their call's name. Time is linear in the
text, whatever the pieces.

## What comes out

- **Arguments** are given as they arrive. Where the format has them as a JSON object, they are the model's own text,
  checked on the way; a raw control character in a string and a backslash before a character that JSON does not escape
  are mended. Where they are written otherwise, they are put into JSON as far as nothing of it can have to be taken
  back: text at once, any other value when it ends. Text is typed by the tool's schema.
- **The last brace** of the arguments is given only when the call is complete, so arguments, joined, are valid JSON
  exactly then.
- **A call that breaks off**, because the answer reached its longest length, keeps the arguments given so far. One whose
  name was not complete is left out. With `whole_calls`, which is for answers that are not streamed, a call is given
  once it is complete, and one that breaks off never.
- **A call that is none**, because it is malformed, comes out as content, markers included. Where part of it had been
  given, the rest up to the end of the call is left out.
- **Calls without a marker** (Llama 3 without its tag, Python lists, and `hermes`, for small models of it write a call
  bare or in a code fence) count only at the beginning of an answer, and only if they name tools that were offered; an
  answer that is JSON, or a list, stays content.
- **White space** beside a marker belongs to it, up to 64 characters, in the formats whose templates put it there.
- **Markers inside reasoning** are reasoning, except where a family's models are known to start a call without closing
  their thoughts.
- **A call's id** is given only where the format has one and it comes before the arguments.

## transformers' response templates

transformers reads the text of a model whose tokenizer brings a `response_template`.
[`response_template.py`](../gateway/parsing/response_template.py) makes it a parser like the others. It comes second,
for a model of no family below: it gives a call only once it has ended, raises for one it cannot read, and keeps and
copies all text, so that its time grows with the square of the answer's length.
"""

_CONFORMANCE = """\
Every fixture is replayed as text: whole, character by character, and in three random cuts, which is harder than the
suite's own cuts between tokens. A pass is strict: every cut gives what the suite expects, white space included. *Whole*
is with `whole_calls`, *streamed* without: the suite counts it a failure when anything of a call that breaks off was
given, which streaming cannot avoid."""


def parsers_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_families(), "", *_conformance()]) + "\n"


def _families() -> Iterator[str]:
    yield "## Families"
    yield ""
    yield "| name | calls and reasoning | reads |"
    yield "|---|---|---|"
    for name, family in FAMILIES.items():
        yield f"| `{name}` | {family.description.replace('|', chr(92) + '|')} | {_reads(family)} |"


def _reads(family: Family) -> str:
    if family.create_whole_parser:
        return "calls, reasoning"
    return ", ".join(["calls"] * bool(family.create_tool_parser) + ["reasoning"] * bool(family.reasoning))


def _conformance() -> Iterator[str]:
    whole, streamed = judge_all(whole_calls=True), judge_all(whole_calls=False)
    yield f"## Conformance: canitoolcall {suite_version}"
    yield ""
    yield _CONFORMANCE
    yield ""
    yield "| fixtures of | families | number | whole | streamed |"
    yield "|---|---|---|---|---|"
    numbers, whole_passes, streamed_passes = _count(whole), _passes(whole), _passes(streamed)
    for name in sorted(numbers):
        families = ", ".join(f"`{family}`" for family in sorted(_families_used(whole, name)))
        yield f"| {name} | {families} | {numbers[name]} | {whole_passes[name]} | {streamed_passes[name]} |"
    yield f"| **all** | | {numbers.total()} | **{whole_passes.total()}** | **{streamed_passes.total()}** |"
    for title, cases in (("whole", whole), ("streamed", streamed)):
        yield ""
        yield f"What does not pass, {title}:"
        yield ""
        yield from (_failure(case) for case in cases if case.status is not Status.PASS)


def _count(cases: tuple[Case, ...]) -> Counter[str]:
    return Counter(case.fixture.family for case in cases)


def _passes(cases: tuple[Case, ...]) -> Counter[str]:
    return Counter(case.fixture.family for case in cases if case.status is Status.PASS)


def _families_used(cases: tuple[Case, ...], suite_family: str) -> set[str]:
    models = {case.fixture.reference_model for case in cases if case.fixture.family == suite_family}
    return {name for model in models for name in families_of(model) if name}


def _failure(case: Case) -> str:
    detail = " ".join(case.detail.split()).replace("|", "\\|").replace("<", "&lt;")
    return f"- `{case.fixture.id}`: {detail[:DETAIL_CHARS_MAX]}"


if __name__ == "__main__":
    sys.stdout.write(parsers_page())
