"""Which web pages may call."""

from __future__ import annotations

import pytest

from gateway.cors import CorsPolicy

ALLOW = b"access-control-allow-origin"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:8080", True),
        ("http://ui.localhost", True),
        ("app://obsidian.md", True),
        ("vscode-webview://abc", True),
        ("https://example.com", False),
        ("http://localhost.example.com", False),
        ("http://localhost:3000.example.com", False),
        ("null", False),
    ],
)
def test_by_default_pages_of_this_machine_and_apps_may_call(origin: str, allowed: bool):
    """A foreign page could otherwise use the mesh behind its visitor's back."""
    headers = dict(CorsPolicy(()).headers({b"origin": origin.encode()}))
    assert headers.get(ALLOW) == (origin.encode() if allowed else None)
    assert headers[b"vary"] == b"origin"


def test_named_origins_replace_the_default():
    """Exactly those."""
    policy = CorsPolicy(["https://Example.com/"])
    assert dict(policy.headers({b"origin": b"https://example.com"}))[ALLOW] == b"https://example.com"
    assert ALLOW not in dict(policy.headers({b"origin": b"http://localhost:3000"}))


def test_a_star_allows_everyone_with_or_without_an_origin():
    """And needs no `vary`."""
    assert dict(CorsPolicy(["*"]).headers({}))[ALLOW] == b"*"


def test_a_preflight_grants_whatever_headers_are_asked_for():
    """SDKs send a dozen of their own."""
    asked = {
        b"access-control-request-headers": b"authorization,x-stainless-lang",
        b"access-control-request-private-network": b"true",
    }
    headers = dict(CorsPolicy(()).preflight(asked))
    assert headers[b"access-control-allow-headers"] == b"authorization,x-stainless-lang"
    assert b"POST" in headers[b"access-control-allow-methods"]
    assert headers[b"access-control-allow-private-network"] == b"true"
    assert dict(CorsPolicy(()).preflight({}))[b"access-control-allow-headers"] == b"*"
