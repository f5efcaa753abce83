"""Writes docs/settings.md from the commands themselves: ``python -m tests.support.settings_docs``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

SETTINGS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_HEAD = """\
# Settings

Every setting is a flag and a variable; a flag wins over its variable. This page is written from the commands'
own flags by `make docs`, and a test fails when it is stale. `meshnet gateway` and `meshnet shard` take what
`python -m gateway` and `python -m shard` take. What `meshnet up` starts also sees your environment, so that a variable
of the gateway or of a node that has no flag there works with it too.
"""


@dataclass(frozen=True, slots=True)
class DocumentedCommand:
    """A command of this project and how it is called."""

    call: str
    command: click.Command


def documented_commands() -> list[DocumentedCommand]:
    """Every command that has settings of its own."""
    from gateway.__main__ import command as gateway_command
    from shard.__main__ import command as shard_command
    from shard.convert import main as convert_command
    from shared.cli.__main__ import main as meshnet

    own = [
        DocumentedCommand(f"meshnet {name}", meshnet.commands[name]) for name in ("up", "demo", "pull", "plan", "drain")
    ]
    return [
        *own,
        DocumentedCommand("python -m gateway", gateway_command),
        DocumentedCommand("python -m shard", shard_command),
        DocumentedCommand("python -m shard.convert", convert_command),
    ]


def settings_of(command: click.Command) -> list[click.Option]:
    """Its flags, in the order in which they are declared."""
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def settings_page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(line for entry in documented_commands() for line in _section(entry))])


def _section(entry: DocumentedCommand) -> Iterator[str]:
    context = click.Context(entry.command, info_name=entry.call)
    arguments = " ".join(p.make_metavar(context) for p in entry.command.params if isinstance(p, click.Argument))
    summary = (entry.command.help or "").split("\n\n")[0].replace("\n", " ")
    yield f"## {entry.call}\n"
    yield f"`{entry.call}{' ' + arguments if arguments else ''} [flags]`: {summary}\n"
    yield "| flag | variable | default | meaning |\n|---|---|---|---|"
    for option in settings_of(entry.command):
        yield _row(option, context)
    yield ""


def _row(option: click.Option, context: click.Context) -> str:
    flag = "/".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.make_metavar(context).removesuffix(' RANGE')}"
    cells = [f"`{flag}{value}`", f"`{option.envvar}`", _default(option), option.help or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(option: click.Option) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.required:
        return "(must be given)"
    if option.is_flag:
        return "on" if option.default is True else "off"
    if option.default in (None, ()) or not isinstance(option.default, str | int | float):
        return "(none)"
    return f"`{option.default}`"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
