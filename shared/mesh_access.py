"""Who may open a link, and how one is opened: tokens and certificates of the mesh, for both sides."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace

from shared.handshake import check_hello
from shared.link import Link, dial
from shared.mesh_tokens import MeshTokens
from shared.messages import Hello, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAccess:
    """What this process shows when it dials, and asks for when it is dialled.

    Args:
        tokens: The mesh's tokens.
        listen_context: TLS of its listening side; None listens without.
        dial_context: TLS of ``wss://`` links that it dials; None is what the system trusts.
        needs_certificate: Whether a peer must have shown a certificate of `--mesh-client-ca`.
    """

    tokens: MeshTokens = field(default_factory=MeshTokens)
    listen_context: ssl.SSLContext | None = None
    dial_context: ssl.SSLContext | None = None
    needs_certificate: bool = False

    @property
    def has_token(self) -> bool:
        """Whether a token is asked for."""
        return bool(self.tokens.accepted())

    async def dial(self, url: str, hello: Hello) -> Link:
        """Open a link as `shared.link.dial` does, with the token that is to be presented now."""
        return await dial(url, replace(hello, token=self.tokens.presented()), context=self.dial_context)

    def check(self, hello: Hello, *, has_certificate: bool, model: str | None) -> Refused | None:
        """Why a peer that has dialled must be refused, or None.

        Args:
            hello: What it said.
            has_certificate: Whether it has shown one; see `WebSocketTransport.has_certificate`.
            model: As `shared.handshake.check_hello`.
        """
        if self.needs_certificate and not has_certificate:
            return Refused(
                code="certificate_required",
                message="links to this address need a client certificate: --mesh-cert and --mesh-key",
            )
        return check_hello(hello, tokens=self.tokens.accepted(), model=model)
