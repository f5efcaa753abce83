"""Server-sent events with a name, as the Responses and Messages APIs send them: ``event:``, ``data:``, a blank line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.openai_errors import json_bytes


def named_event(event: Mapping[str, Any]) -> bytes:
    """One event, named by its own `type`."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_bytes(event))
