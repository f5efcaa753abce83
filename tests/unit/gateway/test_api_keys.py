"""API keys."""

from __future__ import annotations

import pytest

from gateway.api_keys import ApiKeys
from gateway.request_record import choose_request_id
from shared.mesh_tokens import MeshTokens


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"Bearer one", None),
        (b"bearer  two ", None),
        (b"Bearer three", "invalid_api_key"),
        (b"Bearer ", "invalid_api_key"),
        (b"Basic one", "invalid_api_key"),
        (b"one", "invalid_api_key"),
        (b"Bearer \xff", "invalid_api_key"),
        (b"", "invalid_api_key"),
    ],
)
def test_only_a_configured_key_is_accepted(header: bytes, code: str | None):
    """As a bearer token; anything else is a 401."""
    refused = ApiKeys(["one", "two"]).check("/v1/models", {b"authorization": header})
    assert (refused.code if refused else None) == code
    if refused is not None:
        assert refused.status == 401


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ({b"x-api-key": b"one"}, True),
        ({b"x-api-key": b"three"}, False),
        ({b"x-api-key": b""}, False),
        ({b"x-api-key": b"two", b"authorization": b"Bearer something-else"}, True),
        ({b"x-api-key": b"three", b"authorization": b"Bearer one"}, True),
    ],
)
def test_a_key_may_come_as_x_api_key(headers: dict[bytes, bytes], accepted: bool):
    """As Anthropic's clients send it; of two keys, one that is configured is enough."""
    assert (ApiKeys(["one", "two"]).check("/v1/messages", headers) is None) == accepted


def test_probes_need_no_key_and_without_keys_nobody_does():
    """Any or no Authorization is fine when no key is configured."""
    assert ApiKeys(["one"]).check("/healthz", {}) is None
    assert ApiKeys(["one"]).check("/mesh", {}) is not None
    assert ApiKeys([]).check("/v1/models", {b"authorization": b"Bearer anything"}) is None


@pytest.mark.parametrize("given", [b"abc-1.2_3:4", b"x" * 128])
def test_a_sane_request_id_is_kept(given: bytes):
    """Callers find their own id in our logs."""
    assert choose_request_id({b"x-request-id": given}) == given.decode()


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"\xff", b"a\tb"])
def test_any_other_request_id_is_replaced(given: bytes):
    """What is unsafe in a header or a log is not repeated."""
    assert choose_request_id({b"x-request-id": given}).startswith("req_")


@pytest.mark.parametrize(
    ("path", "secret", "accepted"),
    [
        ("/mesh/nodes/a/drain", b"key", True),
        ("/mesh/nodes/a/drain", b"token", True),
        ("/mesh/nodes/a/drain", b"other", False),
        ("/mesh", b"token", True),
        ("/v1/models", b"token", False),
    ],
)
def test_the_mesh_token_opens_what_operates_nodes_and_no_more(path: str, secret: bytes, accepted: bool):
    """Nodes have it, and they are no clients."""
    keys = ApiKeys(["key"], mesh_tokens=MeshTokens(["token"]))
    assert (keys.check(path, {b"authorization": b"Bearer " + secret}) is None) is accepted


def test_with_the_mesh_token_alone_nodes_are_not_everybodys_to_drain():
    """Anybody may call and look, but not take nodes out of service."""
    keys = ApiKeys([], mesh_tokens=MeshTokens(["token"]))
    assert keys.check("/v1/models", {}) is None
    assert keys.check("/mesh", {}) is None
    assert keys.check("/mesh/nodes/a/drain", {}) is not None
    assert keys.check("/mesh/nodes/a/drain", {b"authorization": b"Bearer token"}) is None
    assert ApiKeys([]).check("/mesh/nodes/a/drain", {}) is None
