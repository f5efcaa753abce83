"""The tables of docs/api.md, written from the tables that the code itself obeys.

``python -m gateway.api_reference`` brings docs/api.md up to date; a test fails when it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gateway.messages.parameters import TABLE as MESSAGES
from gateway.openai_parameters import HARMLESS, HONOURED, REFUSED, STREAM_OPTIONS_REFUSED
from gateway.parameter_table import ParameterTable, Refused
from gateway.responses.parameters import TABLE as RESPONSES

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


def parameter_tables() -> str:
    """Every parameter of a chat completion, as Markdown."""
    return "".join(_lines())


def updated(page: str) -> str:
    """The page with the tables as they must be now.

    Raises:
        ValueError: If the page has lost the marks between which they stand.
    """
    sections = {
        "tables": parameter_tables(),
        "tables of responses": _short_tables(RESPONSES),
        "tables of messages": _short_tables(MESSAGES),
    }
    for name, tables in sections.items():
        page = _with_section(page, name, tables)
    return page


def _with_section(page: str, name: str, tables: str) -> str:
    begin = f"<!-- {name}: written by `python -m gateway.api_reference` -->\n"
    end = f"<!-- end of {name} -->\n"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page needs the marks {begin.strip()!r} and {end.strip()!r}")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def _lines() -> Iterator[str]:
    yield "### Honoured\n\n| parameter | meaning |\n|---|---|\n"
    for name, note in HONOURED.items():
        yield f"| `{name}` | {note} |\n"
    yield "\n### Accepted, because ignoring them changes nothing in the answer\n\n"
    yield "| parameter | type | why |\n|---|---|---|\n"
    for name, harmless in HARMLESS.items():
        yield f"| `{name}` | {harmless.expected} | {harmless.note} |\n"
    yield "\n### Refused with a 400 that names them\n\n"
    yield "| parameter | accepted all the same | why refused |\n|---|---|---|\n"
    for name, refused in REFUSED.items():
        yield _refused_line(name, refused)
    for name, refused in STREAM_OPTIONS_REFUSED.items():
        yield _refused_line(f"stream_options.{name}", refused)


def _short_tables(table: ParameterTable) -> str:
    honoured = [f"| `{name}` | {note} |\n" for name, note in table.honoured.items()]
    harmless = [f"| `{name}` | {known.expected} | {known.note} |\n" for name, known in table.harmless.items()]
    refused = [_refused_line(name, known) for name, known in table.refused.items()]
    return "".join(
        [
            "| honoured | meaning |\n|---|---|\n",
            *honoured,
            "\n| accepted without effect | type | why |\n|---|---|---|\n",
            *harmless,
            "\n| refused with a 400 | accepted all the same | why refused |\n|---|---|---|\n",
            *refused,
        ]
    )


def _refused_line(name: str, refused: Refused) -> str:
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in (None, *refused.neutral))
    return f"| `{name}` | {neutral} | {refused.reason} |\n"


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
