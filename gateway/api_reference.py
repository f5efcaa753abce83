"""The tables of docs/api.md, written from the tables that the code itself obeys.

``python -m gateway.api_reference`` brings docs/api.md up to date; a test fails when it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.completions import parameters as completions
from gateway.completions.parameters import COMPLETIONS
from gateway.embeddings.schema import EMBEDDINGS
from gateway.messages.parameters import TABLE as MESSAGES
from gateway.openai_parameters import CHAT, STREAM_OPTIONS_REFUSED
from gateway.parameter_table import ParameterTable, Refused
from gateway.responses.parameters import TABLE as RESPONSES

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
COMMAND = "written by `python -m gateway.api_reference`"
END = "<!-- end of tables -->\n"

Refusals = Mapping[str, Refused]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Args:
        begin: The mark after which its tables stand; they end at the next `END`.
        table: What they say.
        stream_options: What is refused within `stream_options`.
    """

    begin: str
    table: ParameterTable
    stream_options: Refusals = field(default_factory=dict)


SECTIONS = (
    Section(f"<!-- tables: {COMMAND} -->\n", CHAT, STREAM_OPTIONS_REFUSED),
    Section(f"<!-- tables of completions: {COMMAND} -->\n", COMPLETIONS, completions.STREAM_OPTIONS_REFUSED),
    Section(f"<!-- tables of embeddings: {COMMAND} -->\n", EMBEDDINGS),
    Section(f"<!-- tables of responses: {COMMAND} -->\n", RESPONSES),
    Section(f"<!-- tables of messages: {COMMAND} -->\n", MESSAGES),
)


def updated(page: str) -> str:
    """The page with the tables as they must be now.

    Raises:
        ValueError: If the page has lost the marks between which they stand.
    """
    for section in SECTIONS:
        before, begin, rest = page.partition(section.begin)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"the page needs the marks {section.begin.strip()!r} and {END.strip()!r}")
        page = f"{before}{begin}\n{''.join(_lines(section))}\n{END}{after}"
    return page


def _lines(section: Section) -> Iterator[str]:
    table = section.table
    yield "### Honoured\n\n| parameter | meaning |\n|---|---|\n"
    for name, note in table.honoured.items():
        yield f"| `{name}` | {note} |\n"
    yield "\n### Accepted, because ignoring them changes nothing in the answer\n\n"
    yield "| parameter | type | why |\n|---|---|---|\n"
    for name, harmless in table.harmless.items():
        yield f"| `{name}` | {harmless.expected} | {harmless.note} |\n"
    yield "\n### Refused with a 400 that names them\n\n"
    yield "| parameter | accepted all the same | why refused |\n|---|---|---|\n"
    for name, refused in table.refused.items():
        yield _refused_line(name, refused)
    for name, refused in section.stream_options.items():
        yield _refused_line(f"stream_options.{name}", refused)


def _refused_line(name: str, refused: Refused) -> str:
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in (None, *refused.neutral))
    return f"| `{name}` | {neutral} | {refused.reason} |\n"


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
