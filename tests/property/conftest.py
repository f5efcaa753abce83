"""How properties are tried: as many examples as by default, without a wall-clock deadline for each."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("meshnet", deadline=None)  # a machine under load is slow, not wrong
settings.load_profile("meshnet")
