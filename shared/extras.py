"""The packages that only one side needs, and one sentence for whoever starts that side without them."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

EXTRAS: Final = {
    "gateway": ("jinja2", "litestar", "llguidance", "msgspec", "tokenizers", "transformers", "uvicorn", "httptools"),
    "shard": (
        "accelerate",
        "gguf",
        "llguidance",
        "llvmlite",
        "numpy",
        "psutil",
        "safetensors",
        "torch",
        "transformers",
    ),
}
"""As in pyproject.toml; every package is imported by the name under which it is installed."""
EXIT_MISSING: Final = 2


def missing_packages(extra: str) -> list[str]:
    """What the extra names and this Python does not have; nothing is imported."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def install_hint(extra: str, missing: list[str]) -> str:
    """How to get an extra's packages."""
    torch = "pip install 'torch==2.13.0', then " if "torch" in missing else ""
    return f"{', '.join(missing)} not installed here; in meshnet's checkout: {torch}pip install '.[{extra}]'"


def require_extra(extra: str) -> None:
    """End this process with one sentence if a package of the extra is missing."""
    missing = missing_packages(extra)
    if missing:
        sys.stderr.write(f"error: python -m {extra} needs meshnet's {extra} extra: {install_hint(extra, missing)}\n")
        sys.exit(EXIT_MISSING)
