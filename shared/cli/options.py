"""The flags and variables of `meshnet up` and `meshnet pull`, as click options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shared.models.catalogue import DEFAULT_MODEL

NODES_MAX = 512
"""More processes than any model has layers."""
_PORT_MAX = 65_535
_THREADS_MAX = 1024

Decorator = Callable[[Any], Any]


def _option(flag: str, variable: str, help: str, **settings: Any) -> Decorator:  # noqa: A002 - click's word
    return click.option(flag, envvar=f"MESHNET_{variable}", show_envvar=True, help=help, **settings)


def model_argument(function: Any) -> Any:
    """Add the model as an argument that may be left out."""
    return click.argument("model", envvar="MESHNET_MODEL", default=DEFAULT_MODEL)(function)


cache_dir_option = _option(
    "--cache-dir",
    "CACHE_DIR",
    "Where fetched and converted models are kept.",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="the platform's cache folder",
)

refresh_option = _option("--refresh", "REFRESH", "Ask the hub for a newer revision of a repository.", is_flag=True)

_UP = (
    _option(
        "--model",
        "MODEL",
        "A Hugging Face folder, a .gguf file, a hub id such as owner/name, or a catalogue name.",
        default=DEFAULT_MODEL,
        metavar="MODEL",
    ),
    _option(
        "--nodes",
        "UP_NODES",
        "How many nodes share the model's layers.",
        default=2,
        type=click.IntRange(1, NODES_MAX),
    ),
    _option("--host", "HOST", "Where the gateway listens; the nodes stay on this machine.", default="127.0.0.1"),
    _option("--port", "PORT", "The gateway's port.", default=8000, type=click.IntRange(1, _PORT_MAX)),
    _option(
        "--threads",
        "THREADS",
        "Threads that compute in each node.",
        type=click.IntRange(1, _THREADS_MAX),
        show_default="the cores divided by the nodes, at least 1",
    ),
    _option(
        "--dtype",
        "DTYPE",
        "What weights are held and computed in; auto takes the checkpoint's own.",
        default="auto",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    ),
    _option("--device", "DEVICE", "Every node's device: auto, cpu, cuda, cuda:1 or mps.", default="auto"),
    cache_dir_option,
    _option("--insecure", "INSECURE", "Serve beyond this machine without API key and mesh token.", is_flag=True),
    _option(
        "--log-level",
        "LOG_LEVEL",
        "Least severe events to show; debug also shows those of the start.",
        default="info",
        type=click.Choice(["debug", "info", "warning", "error"]),
    ),
    _option(
        "--exit-with-parent",
        "EXIT_WITH_PARENT",
        "End when the process that started this one is gone, also when it was killed.",
        is_flag=True,
    ),
)


def up_options(function: Any) -> Any:
    """Add every flag of `meshnet up` to a click command."""
    for add in reversed(_UP):
        function = add(function)
    return function
