"""Responses that are kept for a while: in this process's memory, and within bounds.

Each entry holds a response and the input of its own call alone; what came before is found by going back along
`previous_response_id`. Using a response marks its whole line as used, from itself back to the first: so the
least recently used entry is always the end of a line, and what is dropped for room never leaves a gap in another's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gateway.openai_errors import ApiError, json_bytes, quoted
from gateway.responses.items import Item
from shared.clock import Clock

RESPONSES_MAX = 4096
"""Bounds the length of a line as well, and with it the time that going along one takes."""
STORE_BYTES_MAX = 64 * 2**20
"""Some 10,000 pages of text; a gateway has a few hundred MiB of its own."""
KEPT_S = 24 * 3600.0
"""A chat that is taken up again the next day sends its history."""
ENTRY_BYTES = 2048
"""What an entry costs beside its JSON: objects and indices, rounded up."""


@dataclass(slots=True)
class StoredResponse:
    """One entry.

    Args:
        body: The response, as JSON.
        status: The response's.
        items: The input of its own call, as JSON.
        item_ids: Of input and output.
        previous_id: The response that it continues.
        used_s: Monotonic time of its last use.
    """

    body: bytes
    status: str
    items: bytes
    item_ids: tuple[str, ...]
    previous_id: str | None
    used_s: float

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return len(self.body) + len(self.items) + ENTRY_BYTES


class ResponseStore:
    """Keeps responses.

    Args:
        clock: Tells their age.
        responses_max: How many.
        bytes_max: How much, of all together.
        kept_s: How long after their last use.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        responses_max: int = RESPONSES_MAX,
        bytes_max: int = STORE_BYTES_MAX,
        kept_s: float = KEPT_S,
    ) -> None:
        self._clock = clock
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._kept_s = kept_s
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, str] = {}
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of all entries together."""
        return self._bytes

    def keep(self, response: Mapping[str, object], items: Sequence[Item]) -> None:
        """Add a response with the input of its call, and drop what has become too much.

        Args:
            response: As the API writes it; its `previous_response_id` names what it continues.
            items: Of this call alone.
        """
        response_id, previous_id, output = response["id"], response["previous_response_id"], response["output"]
        if not isinstance(response_id, str) or not isinstance(output, list):
            raise ValueError("not a response")
        entry = StoredResponse(
            body=json_bytes(response),
            status=str(response["status"]),
            items=msgspec.json.encode(items),
            item_ids=tuple(item["id"] for item in (*items, *output)),
            previous_id=previous_id if isinstance(previous_id, str) else None,
            used_s=self._clock.monotonic(),
        )
        if response_id in self._entries:  # it failed after its last event had been written
            self._drop(response_id)
        self._entries[response_id] = entry
        self._bytes += entry.size
        for item_id in entry.item_ids:
            self._owners.setdefault(item_id, response_id)
        self._touch(response_id)
        self._shrink()

    def find(self, response_id: str) -> StoredResponse | None:
        """An entry, which is thereby used; None where there is none."""
        self._shrink()
        self._touch(response_id)
        return self._entries.get(response_id)

    def get(self, response_id: str) -> StoredResponse:
        """An entry, which is thereby used.

        Raises:
            ApiError: 404 that says why there may be none.
        """
        entry = self.find(response_id)
        if entry is None:
            message = f"Response {quoted(response_id)} is not stored. {self.explain()}"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return entry

    def context(self, response_id: str) -> list[Item]:
        """Everything that a response was made of and what it said: inputs and outputs of its whole line.

        Raises:
            ApiError: 404 if it, or one that it continues, is not there.
        """
        self.find(response_id)
        line: list[Item] = []
        next_id: str | None = response_id
        while next_id is not None:
            entry = self._entries.get(next_id)
            if entry is None:
                raise self._forgotten(response_id, next_id)
            line[:0] = [*_decode(entry.items), *msgspec.json.decode(entry.body)["output"]]
            next_id = entry.previous_id
        return line

    def inputs(self, response_id: str) -> list[Item]:
        """What a response was made of: the context of the one that it continues, and its own input.

        Raises:
            ApiError: 404 as `get` and `context`.
        """
        entry = self.get(response_id)
        before = self.context(entry.previous_id) if entry.previous_id else []
        return [*before, *_decode(entry.items)]

    def find_item(self, item_id: str) -> Item | None:
        """An item of any stored response's input or output."""
        owner = self._owners.get(item_id)
        entry = self.find(owner) if owner else None
        if entry is None:
            return None
        items: list[Item] = [*_decode(entry.items), *msgspec.json.decode(entry.body)["output"]]
        return next(item for item in items if item["id"] == item_id)

    def delete(self, response_id: str) -> None:
        """Forget a response at its caller's wish; what continues it can no longer be continued.

        Raises:
            ApiError: 404 if it is not there.
        """
        self.get(response_id)
        self._drop(response_id)

    def explain(self) -> str:
        """Why a response may be gone, for people."""
        hours = f"{self._kept_s / 3600:g} hours"
        size = f"{self._bytes_max / 2**20:g} MiB"
        return (
            f"This server keeps responses in memory only: the {self._responses_max} last used, up to {size}, for "
            f"{hours} after their last use, unless they were made with store false, and none across a restart."
        )

    def _forgotten(self, response_id: str, missing_id: str) -> ApiError:
        message = f"Previous response {quoted(response_id)} is not stored"
        if missing_id != response_id:
            message += f" completely: it continues {quoted(missing_id)}, which is gone"
        message += f". {self.explain()} Send the whole conversation as input instead, without previous_response_id."
        return ApiError(404, message, param="previous_response_id", code="previous_response_not_found")

    def _touch(self, response_id: str) -> None:
        """Mark a line as used, its first response last."""
        now = self._clock.monotonic()
        next_id: str | None = response_id
        while next_id is not None:
            entry = self._entries.get(next_id)
            if entry is None:
                return
            entry.used_s = now
            self._entries.move_to_end(next_id)
            next_id = entry.previous_id

    def _shrink(self) -> None:
        """Drop what is too old, too many or too much, from the least recently used."""
        oldest_s = self._clock.monotonic() - self._kept_s
        while self._entries:
            response_id, entry = next(iter(self._entries.items()))
            is_full = len(self._entries) > self._responses_max or self._bytes > self._bytes_max
            if not is_full and entry.used_s >= oldest_s:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        self._bytes -= entry.size
        for item_id in entry.item_ids:
            if self._owners.get(item_id) == response_id:
                del self._owners[item_id]


def _decode(data: bytes) -> list[Item]:
    return msgspec.json.decode(data, type=list[dict[str, object]])
