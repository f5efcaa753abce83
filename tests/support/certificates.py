"""Real certificates for tests: an authority, and what it signs, as the PEM files that flags name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates.

    Args:
        folder: Where the files go.
        name: Tells the files of several authorities apart.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self._name = name
        self.cert = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.cert)

    def sign(self, *hosts: str) -> Identity:
        """A certificate for these names or addresses."""
        signed = self._authority.issue_cert(*hosts)
        stem = f"{self._name}-{hosts[0]}".replace("*", "any")
        identity = Identity(self._folder / f"{stem}.pem", self._folder / f"{stem}.key")
        for index, part in enumerate(signed.cert_chain_pems):
            part.write_to_path(identity.cert, append=index > 0)
        signed.private_key_pem.write_to_path(identity.key)
        return identity
