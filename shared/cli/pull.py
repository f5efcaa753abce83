"""`meshnet pull`: fetch and convert a model, and say where it is."""

from __future__ import annotations

from pathlib import Path

import click

from shared.cli.display import open_display
from shared.cli.signals import Wishes, interrupt_on_stop_signals
from shared.models.errors import ModelUnavailable
from shared.models.folder import read_config
from shared.models.source import resolve_model


def run_pull(model: str, cache_dir: Path | None, *, refresh: bool) -> None:
    """Fetch the model with progress on standard error, and print its folder on standard output.

    Raises:
        click.ClickException: It cannot be had; says why.
        click.Abort: Interrupted, also by SIGTERM and SIGHUP.
    """
    interrupt_on_stop_signals(Wishes())
    try:
        with open_display() as display:
            folder = resolve_model(model, cache_dir=cache_dir, progress=display.show, refresh=refresh)
            config = read_config(folder.path)
            display.say(f"{folder.name}: {config.num_layers} layers, fingerprint {folder.fingerprint}")
    except ModelUnavailable as error:
        raise click.ClickException(error.message) from error
    except KeyboardInterrupt as error:
        raise click.Abort from error
    click.echo(folder.path)
