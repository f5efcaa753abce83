"""`meshnet`: the front door. `up`, `demo`, `pull`, `plan`, `drain` are here, `gateway` and `shard` are programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from shared.cli.options import (
    demo_options,
    drain_options,
    model_argument,
    plan_options,
    refresh_option,
    up_options,
)
from shared.models.catalogue import CATALOGUE
from shared.options import SettingError, cache_dir_option
from shared.program_name import STARTED_BY_MESHNET
from shared.version import SOFTWARE, VERSION

_HAND_OVER = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.group(context_settings={"max_content_width": 110, "show_default": True})
@click.version_option(VERSION, message=SOFTWARE)
def main() -> None:
    """Serve one language model from many machines, behind an OpenAI API.

    \b
    On one machine, from nothing:      meshnet up
    What happens when a node dies:     meshnet demo
    On several, one node on each:      meshnet shard --model MODEL --layers 0:12 --listen HOST:PORT
    and a gateway in front of them:    meshnet gateway --model MODEL --node ws://HOST:PORT --node ...
    Which layers where:                meshnet plan --model MODEL --machines FILE.yaml

    Every flag can also be set by the MESHNET_… variable named beside it.
    """  # noqa: D301 - click reads the backspace as "keep these lines"


@main.command()
@up_options
def up(**options: Any) -> None:
    """Serve a model on this machine: a gateway and nodes that share its layers.

    Fetches the model and converts it if that has not been done, shows how far it is, and prints how to talk to it.
    A node that dies is started again, and answers go on; one that will not stay up ends the rest, and its last lines
    are shown. Ctrl-C or SIGTERM ends every process.

    \b
    meshnet up                                   the default chat model on two nodes
    meshnet up --nodes 3 --port 9000             on three, elsewhere
    meshnet up --model Qwen/Qwen2.5-1.5B-Instruct
    meshnet up --model ./my-model.gguf --dtype float32
    """  # noqa: D301 - as above
    from shared.cli.environment import given_api_keys, has_mesh_token, refuse_tls  # noqa: PLC0415 - --help does not wait
    from shared.cli.plan import UpSettings, check_exposure  # noqa: PLC0415 - as above
    from shared.cli.up import run_up  # noqa: PLC0415 - as above
    from shared.parent_watch import exit_with_parent  # noqa: PLC0415 - as above

    if options.pop("exit_with_parent"):
        exit_with_parent()
    log_format = "text" if sys.stderr.isatty() else "json"
    try:
        refuse_tls(os.environ)
        settings = UpSettings(**options, log_format=log_format, api_keys=given_api_keys(os.environ))
        check_exposure(settings, has_mesh_token=has_mesh_token(os.environ))
    except SettingError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(run_up(settings))


@main.command()
@demo_options
def demo(**options: Any) -> None:
    """Kill a node in mid-answer and watch the answer go on.

    Three nodes on this machine hold the model between them, in float32. The same question is asked twice; the second
    time one of the nodes is killed in mid-sentence. Ends with 0 if both answers are the same text.
    """
    from shared.cli.demo import run_demo  # noqa: PLC0415 - --help should not wait for imports
    from shared.cli.environment import given_api_keys, refuse_tls  # noqa: PLC0415 - as above
    from shared.parent_watch import exit_with_parent  # noqa: PLC0415 - as above

    if options.pop("exit_with_parent"):
        exit_with_parent()
    os.environ.setdefault("MESHNET_FAILOVER_TIMEOUT_SECONDS", "300")  # a busy machine loads slowly; it is no failure
    try:
        refuse_tls(os.environ)
        api_keys = given_api_keys(os.environ)
    except SettingError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(run_demo(**options, api_keys=api_keys))


@main.command()
@model_argument
@cache_dir_option
@refresh_option
def pull(model: str, cache_dir: Path | None, *, refresh: bool) -> None:
    """Fetch MODEL, convert it if it is a GGUF, and print its folder.

    MODEL is a hub id such as owner/name, a catalogue name, a .gguf file or a Hugging Face folder; the default chat
    model unless given. An interrupted download goes on where it was.
    """
    from shared.cli.pull import run_pull  # noqa: PLC0415 - --help should not wait for imports

    run_pull(model, cache_dir, refresh=refresh)


@main.command()
@plan_options
def plan(**options: Any) -> None:
    """Say which machine should hold which layers, what that gives, and why; nothing is started.

    Reads the model's config and the headers of its weights, and a YAML file that describes the machines. Prints the
    memory and the time of every hop, why a machine is left out, and the commands that start the fleet. With --gateway
    it shows the plan of a fleet that runs, and what came of its promises.
    """
    gateway = options.pop("gateway")
    access = [options.pop(name) for name in ("mesh_token", "mesh_token_file", "mesh_ca")]
    if gateway is not None:
        from shared.cli.operate import GatewayAccess, run_live_plan  # noqa: PLC0415 - --help should not wait for imports

        run_live_plan(GatewayAccess.create(gateway, *access), as_json=options["json"])
        return
    if options["machines"] is None:
        raise click.UsageError("give --machines FILE, or --gateway URL for a fleet that runs")
    from shared.cli.plan_fleet import PlanSettings, run_plan  # noqa: PLC0415 - as above

    run_plan(PlanSettings(as_json=options.pop("json"), **options))


@main.command()
@click.argument("node")
@drain_options
def drain(node: str, gateway: str, mesh_token: str | None, mesh_token_file: Path | None, mesh_ca: Path | None) -> None:
    """Take NODE out of service while answers go on.

    The gateway gives its layers to others first, moves its sessions to them, and tells it to end. Says what came of it;
    a node that nothing can replace stays in service.
    """
    from shared.cli.operate import GatewayAccess, run_drain  # noqa: PLC0415 - --help should not wait for imports

    run_drain(node, GatewayAccess.create(gateway, mesh_token, mesh_token_file, mesh_ca))


@main.command()
def catalogue() -> None:
    """List the models that have a short name, their terms, and where they are looked for, in order."""
    for entry in CATALOGUE:
        click.echo(f"{entry.name}\n  also      {', '.join(entry.aliases)}")
        click.echo(f"  licence   {entry.licence}\n  sha256    {entry.sha256}")
        for source in entry.sources:
            click.echo(f"  from      {source}")


@main.command(context_settings=_HAND_OVER)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def gateway(arguments: tuple[str, ...]) -> None:
    """Run a gateway; `meshnet gateway --help` shows its flags."""
    become("gateway", arguments)


@main.command(context_settings=_HAND_OVER)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def shard(arguments: tuple[str, ...]) -> None:
    """Run a node; `meshnet shard --help` shows its flags."""
    become("shard", arguments)


def become(module: str, arguments: tuple[str, ...]) -> None:
    """Replace this process by ``python -m module``: same process id, same terminal, no import across packages."""
    sys.stdout.flush()
    environ = {**os.environ, STARTED_BY_MESHNET: "1"}
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environ)  # noqa: S606 - our own interpreter


if __name__ == "__main__":
    main(prog_name="meshnet")
