"""What `meshnet up` and `demo` must know of the variables that their gateway and nodes will see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shared.cli.plan import API_KEYS_VARIABLE, MESH_TOKEN_VARIABLE, split_api_keys
from shared.mesh_tokens import read_secrets
from shared.options import SettingError

API_KEY_FILE_VARIABLE: Final = "MESHNET_API_KEY_FILE"
MESH_TOKEN_FILE_VARIABLE: Final = "MESHNET_MESH_TOKEN_FILE"  # noqa: S105 - its name
API_KEY_VARIABLES: Final = (API_KEYS_VARIABLE, API_KEY_FILE_VARIABLE)
"""What nodes are not told: they have no use for it."""
TLS_VARIABLES: Final = ("MESHNET_TLS_CERT", "MESHNET_TLS_KEY", "MESHNET_MESH_CLIENT_CA")


def given_api_keys(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that the gateway will ask for; we present the first.

    Raises:
        SettingError: The file that should hold them cannot be used.
    """
    file = environment.get(API_KEY_FILE_VARIABLE)
    keys = split_api_keys(environment.get(API_KEYS_VARIABLE, ""))
    return (*keys, *(read_secrets(API_KEY_FILE_VARIABLE, Path(file)) if file else ()))


def has_mesh_token(environment: Mapping[str, str]) -> bool:
    """Whether gateway and nodes will have one."""
    return bool(environment.get(MESH_TOKEN_VARIABLE) or environment.get(MESH_TOKEN_FILE_VARIABLE))


def refuse_tls(environment: Mapping[str, str]) -> None:
    """The nodes of one machine listen on loopback, under a name that no certificate is for.

    Raises:
        SettingError: A variable asks for TLS.
    """
    for variable in TLS_VARIABLES:
        if environment.get(variable):
            raise SettingError(
                variable, "one machine's own fleet has no TLS: start `meshnet gateway` and `meshnet shard` with it"
            )
