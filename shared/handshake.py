"""What each side checks before it calls a link open: the mesh token, the version, the model.

The token comes first, so that who has none learns nothing else.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from shared.errors import HandshakeRefused
from shared.frame import PROTOCOL_VERSION
from shared.messages import Hello, Refused, Welcome

VERSIONS: tuple[int, ...] = (PROTOCOL_VERSION,)
"""The protocol major versions this software speaks."""


def check_hello(
    hello: Hello, *, versions: Sequence[int] = VERSIONS, token: str | None, model: str | None
) -> Refused | None:
    """Why an acceptor must refuse this peer, or None.

    Args:
        hello: What the dialer said.
        versions: Protocol major versions the acceptor speaks.
        token: The mesh token, None when the mesh has none.
        model: Fingerprint of the model the acceptor serves, None when it accepts any.
    """
    if token is not None and not tokens_match(hello.token, token):
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


def tokens_match(given: str | None, expected: str) -> bool:
    """Whether a peer's token is the expected one, in a time that does not depend on where they differ."""
    if given is None:
        return False
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode(errors="surrogatepass"))
