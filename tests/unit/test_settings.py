"""Settings are complete and documented: a flag, a variable, a sentence, and a line in docs/settings.md."""

from __future__ import annotations

import click
import pytest

from tests.support.settings_docs import (
    SETTINGS_PAGE,
    DocumentedCommand,
    documented_commands,
    settings_of,
    settings_page,
)

COMMANDS = documented_commands()
SETTINGS = [
    pytest.param(entry.call, option, id=f"{entry.call} {option.opts[0]}")
    for entry in COMMANDS
    for option in settings_of(entry.command)
]


@pytest.mark.parametrize(("call", "option"), SETTINGS)
def test_every_setting_has_a_variable_and_a_sentence(call: str, option: click.Option):
    """A flag without a MESHNET_ variable or without help is not finished."""
    assert option.opts[0].startswith("--"), f"{call} {option.opts}"
    assert str(option.envvar or "").startswith("MESHNET_"), f"{call} {option.opts[0]} has no variable"
    assert option.show_envvar, f"{call} {option.opts[0]} does not show its variable in --help"
    assert (option.help or "").endswith((".", ")")), f"{call} {option.opts[0]} needs a sentence of help"


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.call)
def test_one_variable_sets_one_flag_of_a_command(entry: DocumentedCommand):
    """Two flags of one command never read the same variable."""
    variables = [option.envvar for option in settings_of(entry.command)]
    assert len(set(variables)) == len(variables)


def test_the_settings_page_is_what_the_commands_say():
    """docs/settings.md is written by `make docs` and committed."""
    assert SETTINGS_PAGE.read_text(encoding="utf-8") == settings_page(), "stale: run `make docs`"
