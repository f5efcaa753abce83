"""Tokens of the mesh: from flags or a file, one presented, all accepted, changed without a new start."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.mesh_access import MeshAccess
from shared.mesh_tokens import SECRETS_FILE_BYTES_MAX, TOKENS_MAX, MeshTokens, read_secrets
from shared.messages import Hello
from shared.options import SettingError


def hello(token: str | None) -> Hello:
    """What a peer says that has this token."""
    return Hello(versions=(1,), role="gateway", peer="g", token=token)


def test_the_first_is_presented_and_all_are_accepted(tmp_path: Path):
    """Given either way; what stands twice counts once."""
    file = tmp_path / "tokens"
    file.write_text("\n  new \nold\nnew\n\n")
    for tokens in (MeshTokens(["new", "old", "new"]), MeshTokens(file=file)):
        assert tokens.accepted() == ("new", "old")
        assert tokens.presented() == "new"


def test_without_any_the_mesh_admits_all():
    """As it always did on one machine."""
    access = MeshAccess()
    assert MeshTokens().presented() is None
    assert not access.has_token
    assert access.check(hello(None), has_certificate=False, model=None) is None


def test_a_changed_file_holds_from_the_next_look(tmp_path: Path):
    """Written in place, or another file put in its place as a mounted secret is."""
    file = tmp_path / "tokens"
    file.write_text("one\n")
    tokens = MeshTokens(file=file)
    access = MeshAccess(tokens=tokens)
    assert access.check(hello("two"), has_certificate=False, model=None) is not None
    file.write_text("one\ntwo\n")
    assert access.check(hello("two"), has_certificate=False, model=None) is None
    assert tokens.presented() == "one"
    (tmp_path / "next").write_text("two")
    (tmp_path / "next").replace(file)
    assert tokens.presented() == "two"
    assert access.check(hello("one"), has_certificate=False, model=None) is not None


@pytest.mark.parametrize("slip", ["", "\n\n", None])
def test_a_file_that_is_emptied_or_lost_opens_nothing(tmp_path: Path, slip: str | None):
    """The tokens stay what they were, and the log says so once, without them."""
    file = tmp_path / "tokens"
    file.write_text("secret-word\n")
    tokens = MeshTokens(file=file)
    if slip is None:
        file.unlink()
    else:
        file.write_text(slip)
    with capture_logs() as logs:
        assert tokens.accepted() == ("secret-word",)
        assert tokens.accepted() == ("secret-word",)
    assert [entry["event"] for entry in logs] == ["mesh_tokens.kept"]
    assert "secret-word" not in str(logs)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"", "holds nothing"),
        (b"\n \n", "holds nothing"),
        (b"secret-\xff", "is not UTF-8 text"),
        (b"s" * (SECRETS_FILE_BYTES_MAX + 1), f"is longer than {SECRETS_FILE_BYTES_MAX} bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_but_not_quoted(tmp_path: Path, content: bytes | None, said: str):
    """Flag, path and reason; nothing of what is in it, not even in the chain of errors."""
    file = tmp_path / "tokens"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingError, match=f"--api-key-file: .*/tokens {said}") as caught:
        read_secrets("--api-key-file", file)
    assert "secret-" not in f"{caught.value} {caught.value.__cause__}"


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path):
    """Two sources, too many tokens, or one that no frame would carry."""
    file = tmp_path / "tokens"
    file.write_text("a")
    with pytest.raises(SettingError, match="either this or --mesh-token, not both"):
        MeshTokens(["b"], file)
    with pytest.raises(SettingError, match=f"at most {TOKENS_MAX} tokens"):
        MeshTokens([str(number) for number in range(TOKENS_MAX + 1)])
    with pytest.raises(SettingError, match="--mesh-token: a token has at most 4096 characters"):
        MeshTokens(["x" * 4097])
    file.write_text("x" * 4097)
    with pytest.raises(SettingError, match="--mesh-token-file: a token has at most"):
        MeshTokens(file=file)


def test_the_certificate_is_asked_for_before_the_token():
    """Who has none learns nothing else."""
    access = MeshAccess(tokens=MeshTokens(["t"]), needs_certificate=True)
    refusal = access.check(hello("wrong"), has_certificate=False, model=None)
    assert refusal is not None
    assert refusal.code == "certificate_required"
    refusal = access.check(hello("wrong"), has_certificate=True, model=None)
    assert refusal is not None
    assert refusal.code == "unauthorized"
    assert access.check(hello("t"), has_certificate=True, model=None) is None


def test_no_token_is_ever_shown():
    """Not by what holds them either."""
    access = MeshAccess(tokens=MeshTokens(["secret-word"]))
    assert "secret-word" not in repr(access) + str(vars(type(access.tokens)))
