"""What this software calls itself to its peers."""

from __future__ import annotations

VERSION = "0.1.0"
"""As in pyproject.toml."""
SOFTWARE = f"meshnet/{VERSION}"
"""Name and version; `hello` and `welcome` carry it for logs, nothing is decided by it."""
