"""The flags and variables of `meshnet up` and `meshnet pull`, as click options."""

from __future__ import annotations

from typing import Any

import click

from shared.models.catalogue import DEFAULT_MODEL
from shared.options import (
    LOG_LEVELS,
    PORT_MAX,
    THREADS_MAX,
    add_options,
    cache_dir_option,
    dtype_option,
    exit_with_parent_option,
    option,
)

NODES_MAX = 512
"""More processes than any model has layers."""


def model_argument(function: Any) -> Any:
    """Add the model as an argument that may be left out."""
    return click.argument("model", envvar="MESHNET_MODEL", default=DEFAULT_MODEL)(function)


refresh_option = option("--refresh", "REFRESH", "Ask the hub for a newer revision of a repository.", is_flag=True)

_UP = (
    option(
        "--model",
        "MODEL",
        "A Hugging Face folder, a .gguf file, a hub id such as owner/name, or a catalogue name.",
        default=DEFAULT_MODEL,
        metavar="MODEL",
    ),
    option(
        "--nodes",
        "UP_NODES",
        "How many nodes share the model's layers.",
        default=2,
        type=click.IntRange(1, NODES_MAX),
    ),
    option("--host", "HOST", "Where the gateway listens; the nodes stay on this machine.", default="127.0.0.1"),
    option("--port", "PORT", "The gateway's port.", default=8000, type=click.IntRange(1, PORT_MAX)),
    option(
        "--threads",
        "THREADS",
        "Threads that compute in each node.",
        type=click.IntRange(1, THREADS_MAX),
        show_default="the cores divided by the nodes, at least 1",
    ),
    dtype_option,
    option("--device", "DEVICE", "Every node's device: auto, cpu, cuda, cuda:1 or mps.", default="auto"),
    cache_dir_option,
    option("--insecure", "INSECURE", "Serve beyond this machine without API key and mesh token.", is_flag=True),
    option(
        "--log-level",
        "LOG_LEVEL",
        "Least severe events to show; debug also shows those of the start.",
        default="info",
        type=click.Choice(LOG_LEVELS),
    ),
    exit_with_parent_option,
)


def up_options(function: Any) -> Any:
    """Add every flag of `meshnet up` to a click command."""
    return add_options(function, _UP)
