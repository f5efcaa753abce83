"""What each side checks before it calls a link open: the mesh token, the version, the model.

The token comes first, so that who has none learns nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from shared.errors import HandshakeRefused
from shared.frame import PROTOCOL_VERSION
from shared.messages import Hello, Refused, Welcome

VERSIONS: tuple[int, ...] = (PROTOCOL_VERSION,)
"""The protocol major versions this software speaks."""


def check_hello(
    hello: Hello, *, versions: Sequence[int] = VERSIONS, tokens: Sequence[str], model: str | None
) -> Refused | None:
    """Why an acceptor must refuse this peer, or None.

    Args:
        hello: What the dialer said.
        versions: Protocol major versions the acceptor speaks.
        tokens: The mesh's tokens, of which the peer must present one; empty when the mesh has none.
        model: Fingerprint of the model the acceptor serves, None when it accepts any.
    """
    if isinstance(tokens, str):
        raise TypeError("tokens are a sequence of tokens, not of characters")
    if tokens and not is_accepted(hello.token, tokens):
        return Refused(code="unauthorized", message="the mesh token is missing or wrong")
    if choose_version(hello.versions, versions) is None:
        return Refused(code="version_mismatch", message=f"no common version of {hello.versions} and {tuple(versions)}")
    offered = hello.node.model if hello.node is not None else None
    for fingerprint in (hello.model, offered):
        if model is not None and fingerprint is not None and fingerprint != model:
            return Refused(code="model_mismatch", message=f"the model here is {model}, not {fingerprint}")
    return None


def check_welcome(welcome: Welcome, hello: Hello) -> HandshakeRefused | None:
    """Why a dialer must not use the link that `welcome` would open, or None."""
    if welcome.version not in hello.versions:
        return HandshakeRefused("version_mismatch", f"the peer chose version {welcome.version} of {hello.versions}")
    served = welcome.node.model if welcome.node is not None else None
    if hello.model is not None and served is not None and served != hello.model:
        return HandshakeRefused("model_mismatch", f"{welcome.peer} serves model {served}, not {hello.model}")
    return None


def choose_version(theirs: Sequence[int], ours: Sequence[int] = VERSIONS) -> int | None:
    """The highest protocol version that both speak."""
    return max(set(theirs) & set(ours), default=None)


def is_accepted(given: str | None, tokens: Sequence[str]) -> bool:
    """Whether a peer's token is one of these, in a time that depends on neither which one nor where they differ."""
    if given is None:
        return False
    offered = _digest(given)
    matches = [hmac.compare_digest(offered, _digest(token)) for token in tokens]
    return any(matches)


def _digest(token: str) -> bytes:
    """Equal lengths, so that not even a token's length shows in the time that a comparison takes."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
