"""The flags of the mesh that a gateway and a node have in common: tokens and TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shared.mesh_access import MeshAccess
from shared.mesh_tokens import MeshTokens
from shared.options import Decorator, Parsed, option
from shared.tls import create_dial_context, create_listen_context

_FILE = click.Path(dir_okay=False, path_type=Path)


def file_option(flag: str, variable: str, help: str) -> Decorator:  # noqa: A002 - click's word
    """An option that names a file, which need not be there yet."""
    return option(flag, variable, help, metavar="FILE", type=_FILE)


mesh_options = (
    option(
        "--mesh-token",
        "MESH_TOKEN",
        "The secret of the mesh; may be given several times: the first is presented to peers, all are accepted from "
        "them. Prefer the variable or a file: other users of the machine can read a command line.",
        multiple=True,
        metavar="TOKEN",
        type=Parsed("text", str),
    ),
    file_option(
        "--mesh-token-file",
        "MESH_TOKEN_FILE",
        "Where the tokens are instead, one a line. A change of the file holds from the next link on.",
    ),
    file_option("--tls-cert", "TLS_CERT", "Certificate of the listening side, PEM, with those of its issuers."),
    file_option("--tls-key", "TLS_KEY", "Private key of --tls-cert, PEM, without a passphrase."),
    file_option(
        "--mesh-client-ca",
        "MESH_CLIENT_CA",
        "Authorities, PEM, of which whoever opens a link to the listening side must show a certificate.",
    ),
    file_option(
        "--mesh-ca",
        "MESH_CA",
        "Authorities, PEM, that are trusted beside the system's when a wss:// address is dialled.",
    ),
    file_option("--mesh-cert", "MESH_CERT", "Certificate, PEM, that is shown when dialling and asked for one."),
    file_option("--mesh-key", "MESH_KEY", "Private key of --mesh-cert, PEM, without a passphrase."),
)


def read_mesh_access(options: dict[str, Any]) -> MeshAccess:
    """The parsed `mesh_options` as what they give.

    Raises:
        SettingError: They do not go together, or a file cannot be used.
    """
    return MeshAccess(
        tokens=MeshTokens(tuple(filter(None, options["mesh_token"])), options["mesh_token_file"]),
        listen_context=create_listen_context(options["tls_cert"], options["tls_key"], options["mesh_client_ca"]),
        dial_context=create_dial_context(options["mesh_ca"], options["mesh_cert"], options["mesh_key"]),
        needs_certificate=options["mesh_client_ca"] is not None,
    )
