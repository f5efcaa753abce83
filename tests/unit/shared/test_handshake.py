"""What each side checks of the other, by value."""

from __future__ import annotations

import hmac

import pytest

from shared import handshake
from shared.handshake import check_hello, check_welcome, choose_version, is_accepted
from shared.layers import LayerRange
from shared.messages import Hello, NodeInfo, Welcome


def hello(**fields: object) -> Hello:
    """A gateway's hello with some fields set."""
    return Hello(**{"versions": (1,), "role": "gateway", "peer": "g", **fields})  # type: ignore[arg-type]


def node(model: str) -> NodeInfo:
    """A node that serves a model."""
    return NodeInfo(node="n", model=model, layers=LayerRange(0, 1), num_layers=1)


@pytest.mark.parametrize(
    ("said", "token", "model", "code"),
    [
        (hello(), None, None, None),
        (hello(token="t"), "t", None, None),
        (hello(token="t"), None, None, None),
        (hello(), "t", None, "unauthorized"),
        (hello(token=""), "t", None, "unauthorized"),
        (hello(token="T"), "t", None, "unauthorized"),
        (hello(token="tt"), "t", None, "unauthorized"),
        (hello(token="schlüssel"), "schlüssel", None, None),
        (hello(versions=(2, 1)), None, None, None),
        (hello(versions=(2,)), None, None, "version_mismatch"),
        (hello(versions=()), None, None, "version_mismatch"),
        (hello(model="m"), None, "m", None),
        (hello(model="m"), None, None, None),
        (hello(), None, "m", None),
        (hello(model="other"), None, "m", "model_mismatch"),
        (hello(role="node", node=node("other")), None, "m", "model_mismatch"),
        (hello(role="node", node=node("m")), None, "m", None),
        (hello(token="x", versions=(9,), model="other"), "t", "m", "unauthorized"),
    ],
)
def test_an_acceptor_checks_token_version_and_model(
    said: Hello, token: str | None, model: str | None, code: str | None
):
    """Each check alone, and the token first of all, so that who has none learns nothing else."""
    refusal = check_hello(said, versions=(1,), tokens=[] if token is None else [token], model=model)
    assert (refusal.code if refusal else None) == code


def test_a_refusal_never_quotes_a_token():
    """Neither the given token nor the expected one appears in what is sent back."""
    refusal = check_hello(hello(token="given-secret"), tokens=["expected-secret", "next-secret"], model=None)
    assert refusal is not None
    assert "secret" not in refusal.message


@pytest.mark.parametrize(("given", "accepted"), [("old", True), ("new", True), ("older", False), ("", False)])
def test_any_of_several_tokens_opens(given: str, accepted: bool):
    """So that a mesh can change its token without a pause."""
    assert (check_hello(hello(token=given), tokens=["new", "old"], model=None) is None) is accepted


def test_one_token_given_as_text_is_no_list_of_letters():
    """Else every letter of the secret would open the mesh."""
    with pytest.raises(TypeError, match="sequence of tokens"):
        check_hello(hello(token="s"), tokens="secret", model=None)


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    """Equal lengths, and every token each time, whichever matches first."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((len(given), len(expected)))
        return real(given, expected)

    monkeypatch.setattr(handshake.hmac, "compare_digest", compare)
    assert is_accepted("a", ["a", "long" * 100, "b"])
    assert not is_accepted("a\ud800", ["a", "b", "c"])
    assert compared == [(32, 32)] * 6
    assert is_accepted("é", ["é"])
    assert not is_accepted(None, [""])


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Welcome(version=1, peer="n"), None),
        (Welcome(version=1, peer="n", node=node("m")), None),
        (Welcome(version=3, peer="n"), "version_mismatch"),
        (Welcome(version=1, peer="n", node=node("other")), "model_mismatch"),
    ],
)
def test_a_dialer_checks_version_and_model(answer: Welcome, code: str | None):
    """An acceptor that did not check is checked."""
    refusal = check_welcome(answer, hello(versions=(1, 2), model="m"))
    assert (refusal.code if refusal else None) == code


def test_the_highest_common_version_is_chosen():
    """Both sides speak several; the newest that both know wins."""
    assert choose_version((1, 2, 3), (2, 1)) == 2
    assert choose_version((3,), (2, 1)) is None
