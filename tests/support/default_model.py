"""The default chat model, fetched and converted as a user's first `make up` does it."""

from __future__ import annotations

from pathlib import Path

from shared.models.catalogue import CATALOGUE
from shared.models.source import resolve_model


def default_model_folder() -> Path:
    """Its folder; the first call on a machine downloads about 500 MB."""
    return resolve_model(CATALOGUE[0].name).path
