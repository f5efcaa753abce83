"""What this software calls itself to its peers."""

from __future__ import annotations

SOFTWARE = "meshnet/0.1.0"
"""Name and version; `hello` and `welcome` carry it for logs, nothing is decided by it."""
