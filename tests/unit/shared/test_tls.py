"""TLS files: what cannot be used is refused before anything listens, with the flag and the file."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.options import SettingError
from shared.tls import create_dial_context, create_listen_context
from tests.support.certificates import Authority, Identity

ENCRYPTED = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII=\n-----END ENCRYPTED PRIVATE KEY-----\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files are."""
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    """Signs everything here."""
    return Authority(folder)


@pytest.fixture(scope="module")
def identities(authority: Authority) -> tuple[Identity, Identity]:
    """Two certificates with their keys."""
    return authority.sign("localhost"), authority.sign("other")


@pytest.fixture(scope="module")
def good(identities: tuple[Identity, Identity]) -> Identity:
    """The first of them."""
    return identities[0]


def file(folder: Path, name: str, text: str) -> Path:
    """A file with this content."""
    path = folder / name
    path.write_text(text)
    return path


def test_without_files_a_listening_side_has_no_tls():
    """And a dialling side trusts what the system trusts, names checked."""
    assert create_listen_context(None, None, None) is None
    context = create_dial_context(None, None, None)
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_certificates_of_diallers_are_asked_for_but_not_demanded(authority: Authority, good: Identity):
    """Probes and API clients use the same port."""
    plain = create_listen_context(good.cert, good.key, None)
    asking = create_listen_context(good.cert, good.key, authority.cert)
    assert plain is not None
    assert asking is not None
    assert (plain.verify_mode, asking.verify_mode) == (ssl.CERT_NONE, ssl.CERT_OPTIONAL)
    assert asking.minimum_version >= ssl.TLSVersion.TLSv1_2


Files = Callable[[Path, Authority, Identity, Identity], tuple[Path | None, Path | None, Path | None]]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (lambda _f, _a, good, _o: (good.cert, None, None), "--tls-key: is missing beside --tls-cert"),
        (lambda _f, _a, good, _o: (None, good.key, None), "--tls-cert: is missing beside --tls-key"),
        (lambda _f, a, _g, _o: (None, None, a.cert), "--mesh-client-ca: needs --tls-cert and --tls-key"),
        (lambda f, _a, good, _o: (f / "no", good.key, None), r"--tls-cert: .*/no cannot be read: No such file"),
        (lambda f, _a, good, _o: (good.cert, f / "no", None), r"--tls-key: .*/no cannot be read: No such file"),
        (lambda f, _a, good, _o: (f, good.key, None), r"--tls-cert: .* cannot be read: Is a directory"),
        (lambda _f, _a, good, _o: (good.key, good.key, None), r"--tls-cert: .*\.key holds no certificate in PEM"),
        (lambda _f, _a, good, _o: (good.cert, good.cert, None), r"--tls-key: .*\.pem holds no private key in PEM"),
        (lambda _f, _a, good, o: (good.cert, o.key, None), r"--tls-key: .*other\.key is not the key of .*host\.pem"),
        (
            lambda f, _a, good, _o: (good.cert, file(f, "enc.key", ENCRYPTED), None),
            r"--tls-key: .*enc\.key is encrypted: give a key without a passphrase",
        ),
        (
            lambda f, _a, good, _o: (file(f, "cut.pem", good.cert.read_text()[:300]), good.key, None),
            r"--tls-cert: .*cut\.pem and .*\.key cannot be used: ",
        ),
        (lambda f, _a, good, _o: (good.cert, good.key, f / "no"), r"--mesh-client-ca: .*/no cannot be read"),
        (lambda _f, _a, good, _o: (good.cert, good.key, good.key), r"--mesh-client-ca: .*\.key holds no certificate"),
        (
            lambda f, a, good, _o: (good.cert, good.key, file(f, "cut-ca.pem", a.cert.read_text()[:300])),
            r"--mesh-client-ca: .*cut-ca\.pem cannot be used: ",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    folder: Path, authority: Authority, identities: tuple[Identity, Identity], files: Files, said: str
):
    """By its flag, its path and what is wrong with it."""
    with pytest.raises(SettingError, match=said):
        create_listen_context(*files(folder, authority, *identities))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("no", None, None), "--mesh-ca: .*/no cannot be read"),
        ((None, "cert", None), "--mesh-key: is missing beside --mesh-cert"),
        ((None, None, "key"), "--mesh-cert: is missing beside --mesh-key"),
        (("key", None, None), "--mesh-ca: .* holds no certificate"),
    ],
)
def test_a_dialler_names_its_own_flags(
    folder: Path, good: Identity, names: tuple[str | None, str | None, str | None], said: str
):
    """The same faults under the names of the other side."""
    paths = {"no": folder / "no", "cert": good.cert, "key": good.key, None: None}
    with pytest.raises(SettingError, match=said):
        create_dial_context(*(paths[name] for name in names))
