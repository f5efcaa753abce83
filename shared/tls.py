"""TLS on both sides of a connection: contexts made of the files that flags name.

Who listens shows a certificate. Who dials checks it against the system's authorities and those of `--mesh-ca`, the
host's name included. Certificates of those who dial are asked for with `--mesh-client-ca`, but not demanded while the
connection is made: probes and API clients use the same port and have none. Links are refused without one by
`shared.mesh_access`.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final, NoReturn

from shared.options import SettingError

_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_ENCRYPTED: Final = b"ENCRYPTED"


def create_listen_context(cert: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    """What a listening side needs, None without a certificate.

    Args:
        cert: Its certificate, and those between it and the authority, as PEM: `--tls-cert`.
        key: Its private key as PEM: `--tls-key`.
        client_ca: Authorities whose certificates diallers may show: `--mesh-client-ca`.

    Raises:
        SettingError: A file cannot be used, or one is missing; names the flag and the file.
    """
    if cert is None and key is None:
        if client_ca is not None:
            raise SettingError("--mesh-client-ca", "needs --tls-cert and --tls-key: certificates are shown over TLS")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_identity(context, "--tls-cert", cert, "--tls-key", key)
    if client_ca is not None:
        _load_authorities(context, "--mesh-client-ca", client_ca)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def create_dial_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """What a dialling side needs for ``wss://`` addresses.

    Args:
        ca: Authorities that are trusted beside the system's: `--mesh-ca`.
        cert: The certificate that it shows when asked, as PEM: `--mesh-cert`.
        key: Its private key as PEM: `--mesh-key`.

    Raises:
        SettingError: A file cannot be used, or one is missing; names the flag and the file.
    """
    context = ssl.create_default_context()
    if ca is not None:
        _load_authorities(context, "--mesh-ca", ca)
    if cert is not None or key is not None:
        _load_identity(context, "--mesh-cert", cert, "--mesh-key", key)
    return context


def _load_authorities(context: ssl.SSLContext, flag: str, path: Path) -> None:
    if _CERTIFICATE not in _read(flag, path):
        raise SettingError(flag, f"{path} holds no certificate in PEM form")
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise SettingError(flag, f"{path} cannot be used: {_reason(error)}") from error


def _load_identity(context: ssl.SSLContext, cert_flag: str, cert: Path | None, key_flag: str, key: Path | None) -> None:
    if cert is None:
        raise SettingError(cert_flag, f"is missing beside {key_flag}")
    if key is None:
        raise SettingError(key_flag, f"is missing beside {cert_flag}")
    if _CERTIFICATE not in _read(cert_flag, cert):
        raise SettingError(cert_flag, f"{cert} holds no certificate in PEM form")
    key_bytes = _read(key_flag, key)
    if _KEY not in key_bytes:
        raise SettingError(key_flag, f"{key} holds no private key in PEM form")
    if _ENCRYPTED in key_bytes:
        raise SettingError(key_flag, f"{key} is encrypted: give a key without a passphrase")
    try:
        context.load_cert_chain(cert, key, password=_refuse_to_ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingError(key_flag, f"{key} is not the key of the certificate in {cert}") from error
        raise SettingError(cert_flag, f"{cert} and {key} cannot be used: {_reason(error)}") from error


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(flag, f"{path} cannot be read: {error.strerror or error}") from error


def _refuse_to_ask() -> NoReturn:
    """OpenSSL would otherwise ask for a passphrase on the terminal, for ever."""
    raise AssertionError("an encrypted key was refused before")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
