"""Arguments that a model writes one by one, put together as one JSON object while they arrive."""

from __future__ import annotations

import json

from gateway.parsing.json_text import escaped
from gateway.parsing.source import Give
from gateway.parsing.tool_schemas import NULLABLE_TEXT, TEXT, Types, argument_json

_NULL_CHARS_MAX = 4  # a text longer than "null" and "None" is no null


class ArgumentsWriter:
    """Writes a JSON object: `open` a member, give its text piece by piece, `close` it; at last `end`.

    A member that can only be text is given as it arrives. Any other is kept until it is closed, for only
    its whole text tells what it is.
    """

    def __init__(self, give: Give) -> None:
        self._give = give
        self._is_empty = True
        self._types = TEXT
        self._kept: list[str] | None = None
        self._kept_chars = 0

    def open(self, key: str, types: Types) -> None:
        """Begin member `key`, a value of one of `types`."""
        self._give(("{" if self._is_empty else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._is_empty = False
        self._types = types
        self._kept = []
        self._kept_chars = 0
        if types == TEXT:
            self._be_text()

    def text(self, piece: str) -> None:
        """Append to the open member."""
        if self._kept is None:
            self._give(escaped(piece))
            return
        self._kept.append(piece)
        self._kept_chars += len(piece)
        if self._types == NULLABLE_TEXT and self._kept_chars > _NULL_CHARS_MAX:
            self._be_text()

    def close(self) -> None:
        """End the open member."""
        self._give('"' if self._kept is None else argument_json("".join(self._kept), self._types))

    def end(self) -> None:
        """End the object."""
        self._give("{}" if self._is_empty else "}")

    def _be_text(self) -> None:
        kept, self._kept = self._kept or [], None
        self._give('"' + escaped("".join(kept)))
