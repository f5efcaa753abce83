"""The tables of docs/api.md, written from the tables that the code itself obeys.

``python -m gateway.api_reference`` brings docs/api.md up to date; a test fails when it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gateway.openai_parameters import HARMLESS, HONOURED, REFUSED, STREAM_OPTIONS_REFUSED
from gateway.parameter_table import Refused

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
BEGIN = "<!-- tables: written by `python -m gateway.api_reference` -->\n"
END = "<!-- end of tables -->\n"


def parameter_tables() -> str:
    """Every parameter of a chat completion, as Markdown."""
    return "".join(_lines())


def updated(page: str) -> str:
    """The page with the tables as they must be now.

    Raises:
        ValueError: If the page has lost the marks between which they stand.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the marks {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}\n{parameter_tables()}\n{END}{after}"


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


def _refused_line(name: str, refused: Refused) -> str:
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in (None, *refused.neutral))
    return f"| `{name}` | {neutral} | {refused.reason} |\n"


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
