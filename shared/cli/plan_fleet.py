"""`meshnet plan`: which machine should hold which layers, without starting anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from shared.cli.display import open_display
from shared.cli.machines_file import MachinesFileError, read_machines_file
from shared.models.errors import ModelUnavailable
from shared.models.facts import ModelFacts
from shared.models.measure import measure_model
from shared.models.source import resolve_outline
from shared.planning.commands import StartCommands
from shared.planning.fleet import Demand, Objective
from shared.planning.plan import PlanImpossible, plan_fleet
from shared.planning.report import plan_json, plan_text

DEFAULT_CONTEXT_LEN = 4096
DEFAULT_PROMPT_LEN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a user asked for.

    Args:
        model: Folder, file, hub id or catalogue name.
        machines: The YAML file.
        objective: What to minimize.
        sessions: Answers in the making at once.
        context_len: Positions that each may reach; None for `DEFAULT_CONTEXT_LEN`, or the model's if that is less.
        prompt_len: The prompt whose time to first token is predicted; None for `DEFAULT_PROMPT_LEN`, or the context.
        dtype: As the node's flag.
        quantize: As the node's flag.
        replicas: Whether machines left over may hold second copies.
        cache_dir: Where models are kept; None is the platform's cache folder.
        as_json: Print JSON.
    """

    model: str
    machines: Path
    objective: Objective
    sessions: int
    context_len: int | None
    prompt_len: int | None
    dtype: str
    quantize: str
    replicas: bool
    cache_dir: Path | None
    as_json: bool


def run_plan(settings: PlanSettings) -> None:
    """Print the plan on standard output; the model is fetched first if need be.

    Raises:
        click.ClickException: The file or the model cannot be used, or the machines cannot hold it; says why.
    """
    try:
        entries = read_machines_file(settings.machines)
        facts = _measure(settings)
        machines = [entry.machine(facts) for entry in entries]
        demand = _demand(settings, facts)
        plan = plan_fleet(facts, machines, demand, settings.objective, replicas=settings.replicas)
    except MachinesFileError as error:
        raise click.ClickException(str(error)) from error
    except (ModelUnavailable, PlanImpossible) as error:
        raise click.ClickException(error.message) from error
    commands = StartCommands(
        model=settings.model,
        dtype=settings.dtype,
        quantize=settings.quantize,
        addresses={entry.name: entry.address for entry in entries},
        context_len=demand.context_len,
        sessions=settings.sessions,
    )
    if settings.as_json:
        click.echo(json.dumps(plan_json(plan, machines, commands), indent=2))
    else:
        click.echo(plan_text(plan, machines, commands))


def _measure(settings: PlanSettings) -> ModelFacts:
    with open_display() as display:
        folder = resolve_outline(settings.model, cache_dir=settings.cache_dir, progress=display.show)
    return measure_model(folder.path, settings.dtype, settings.quantize)


def _demand(settings: PlanSettings, facts: ModelFacts) -> Demand:
    """What was asked for, kept within what the model can do."""
    longest = facts.context_len or DEFAULT_CONTEXT_LEN
    context_len = settings.context_len or min(DEFAULT_CONTEXT_LEN, longest)
    if facts.context_len and context_len > facts.context_len:
        message = f"--context-len: the model was trained for {facts.context_len} tokens, not {context_len}"
        raise click.ClickException(message)
    prompt_len = settings.prompt_len or min(DEFAULT_PROMPT_LEN, context_len)
    if prompt_len > context_len:
        message = f"--prompt-len: {prompt_len} tokens do not fit the {context_len} of --context-len"
        raise click.ClickException(message)
    return Demand(sessions=settings.sessions, context_len=context_len, prompt_len=prompt_len)
