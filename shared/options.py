"""What the commands' flags have in common: every one has a variable, sizes read alike, and logs are set alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZE_NONE = "none"
QUANTIZATIONS = (QUANTIZE_NONE, "int8", "int4")
LOG_LEVELS = ("debug", "info", "warning", "error")
PORT_MAX = 65_535
THREADS_MAX = 1024

_SIZE = re.compile(r"(\d+)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

Decorator = Callable[[Any], Any]


class SettingError(ValueError):
    """A setting that cannot be served; names the flag and says why."""

    def __init__(self, flag: str, reason: str) -> None:
        super().__init__(f"{flag}: {reason}")
        self.flag = flag
        self.reason = reason


class Parsed(click.ParamType[Any]):
    """A value read by a function that raises `ValueError` saying what the text must look like.

    Where an option may be given several times, its variable holds values apart by commas or spaces.
    """

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text; a default that is no text is taken as it is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def split_envvar_value(self, rv: str) -> list[str]:
        """The values that a variable holds."""
        return rv.replace(",", " ").split()


def parse_bytes(text: str) -> int:
    """Read a size: ``1073741824``, ``512M``, ``2GiB`` (powers of 1,024).

    Raises:
        ValueError: If it is no size above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise ValueError(f"must be a number of bytes above 0 such as 512M or 2G, got {text!r}")
    return int(match[1]) * _SIZE_UNITS[(match[2] or "").upper()]


def option(flag: str, variable: str, help: str, **settings: Any) -> Decorator:  # noqa: A002 - click's word
    """A click option that the variable ``MESHNET_…`` sets too, and whose help says so."""
    return click.option(flag, envvar=f"MESHNET_{variable}", show_envvar=True, help=help, **settings)


def add_options(function: Any, options: Sequence[Decorator]) -> Any:
    """Add options to a click command, in the order in which its help shall list them."""
    for add in reversed(options):
        function = add(function)
    return function


def drain_option(what: str) -> Decorator:
    """How long a process that was told to end goes on with what it has."""
    return option(
        "--drain-seconds",
        "DRAIN_SECONDS",
        f"How long {what} may go on after SIGTERM or Ctrl-C; a second signal ends at once.",
        default=10.0,
        type=click.FloatRange(min=0),
    )


cache_dir_option = option(
    "--cache-dir",
    "CACHE_DIR",
    "Where fetched and converted models are kept.",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="the platform's cache folder",
)

dtype_option = option(
    "--dtype",
    "DTYPE",
    "What weights are held and computed in; auto takes the checkpoint's own.",
    default="auto",
    type=click.Choice(DTYPES),
)

quantize_option = option(
    "--quantize",
    "QUANTIZE",
    "Hold weights in 8 or 4 bits each on a CPU: faster and smaller, less exact (docs/precision.md).",
    default=QUANTIZE_NONE,
    type=click.Choice(QUANTIZATIONS),
)

exit_with_parent_option = option(
    "--exit-with-parent",
    "EXIT_WITH_PARENT",
    "End when the process that started this one is gone, also when it was killed.",
    is_flag=True,
)

log_options = (
    option(
        "--log-level",
        "LOG_LEVEL",
        "Least severe events to log, on standard error.",
        default="info",
        type=click.Choice(LOG_LEVELS),
    ),
    option(
        "--log-format",
        "LOG_FORMAT",
        "auto is text on a terminal, JSON lines otherwise.",
        default="auto",
        type=click.Choice(["auto", "text", "json"]),
    ),
)
