"""Which web pages may use the API: the CORS headers of responses, and the answers to preflights.

By default pages that this machine serves (``http://localhost:3000``) and desktop apps may, and with API
keys configured any page, because the key decides then. Without that rule any site that its user visits
could use the mesh behind their back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ANY_ORIGIN = "*"
LOCAL_ORIGIN = re.compile(
    r"https?://(localhost|[a-z0-9-]+\.localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
    r"|(app|file|tauri|capacitor|vscode-webview|vscode-file|chrome-extension|moz-extension)://.*",
    re.IGNORECASE,
)
METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = b"x-request-id, request-id, retry-after, retry-after-ms, x-should-retry"
MAX_AGE_S = 600
"""How long a browser may remember a preflight's answer."""

Headers = list[tuple[bytes, bytes]]


class CorsPolicy:
    """Decides by origin.

    Args:
        origins: Origins that may use the API, ``*`` for all of them; empty for those of this machine.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY_ORIGIN in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def headers(self, request_headers: Mapping[bytes, bytes]) -> Headers:
        """What every response to this request carries."""
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED_HEADERS)]
        origin = request_headers.get(b"origin")
        if origin is None or not self._allows(origin.decode("latin-1")):
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED_HEADERS),
            (b"vary", b"origin"),
        ]

    def preflight(self, request_headers: Mapping[bytes, bytes]) -> Headers:
        """What the answer to a preflight carries beside `headers`: any header that the client asks for."""
        headers: Headers = [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", request_headers.get(b"access-control-request-headers", b"*")),
            (b"access-control-max-age", str(MAX_AGE_S).encode()),
        ]
        if request_headers.get(b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def _allows(self, origin: str) -> bool:
        if self._origins:
            return origin.lower() in self._origins
        return LOCAL_ORIGIN.fullmatch(origin) is not None
