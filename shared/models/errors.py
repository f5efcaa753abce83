"""What can go wrong on the way to a usable model folder."""

from __future__ import annotations

from shared.errors import MeshError


class ModelUnavailable(MeshError):
    """The model could not be found, fetched, verified, stored or converted.

    `code` is one of `unknown_model`, `not_a_model`, `weights_corrupt`, `no_network`, `download_failed`,
    `ranges_unsupported`, `source_changed`, `hash_mismatch`, `model_mismatch`, `disk_full`, `conversion_failed`,
    `model_unsupported`, `cancelled`.
    """
