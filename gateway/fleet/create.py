"""A fleet from what a gateway has: its mesh, its model's folder, its settings."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Final

import structlog

from gateway.fleet.drain import Drainer
from gateway.fleet.forecast import Forecast
from gateway.fleet.live import Fleet, FleetModel
from gateway.fleet.members import Members
from gateway.fleet.settings import FleetSettings
from gateway.fleet.state import FleetPolicy
from gateway.generation import Generator
from shared.models.errors import ModelUnavailable
from shared.models.facts import ModelFacts
from shared.models.measure import ITEM_BYTES, measure_variants
from shared.options import QUANTIZATIONS, QUANTIZE_NONE
from shared.planning.fleet import Demand

CONTEXT_LEN: Final = 4096
"""What each answer is planned to reach where nobody says; less where the model was trained for less."""
_WIRE_NAMES: Final = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

log = structlog.stdlib.get_logger(__name__)


def create_fleet(generator: Generator, model: FleetModel, folder: Path, settings: FleetSettings) -> Fleet:
    """A fleet over a generator's mesh.

    Args:
        generator: What runs on it.
        model: What it serves.
        folder: The model's files, of which only headers are read.
        settings: What to plan for.
    """
    forecast = create_forecast(folder, settings, chunk_tokens=generator.settings.prefill_chunk_tokens)
    policy = FleetPolicy(objective=settings.objective, grace_s=generator.settings.failover_timeout_s)
    members = Members(
        mesh=generator.mesh,
        model=model.fingerprint,
        num_layers=model.num_layers,
        grace_s=policy.grace_s,
        clock=generator.clock,
        work=forecast.work if forecast is not None else None,
    )
    return Fleet(
        mesh=generator.mesh,
        members=members,
        model=model,
        forecast=forecast,
        policy=policy,
        is_idle=lambda: not generator.admission.active and not generator.admission.queued,
        clock=generator.clock,
    )


def create_drainer(fleet: Fleet, generator: Generator) -> Drainer:
    """What takes nodes of a fleet out of service."""
    return Drainer(
        mesh=fleet.mesh,
        members=fleet.members,
        admission=generator.admission,
        clock=fleet.clock,
        pending=lambda: fleet.pending,
    )


def create_forecast(folder: Path, settings: FleetSettings, *, chunk_tokens: int) -> Forecast | None:
    """Plans for the model in a folder; None, and a line in the log, where its layers cannot be told apart."""
    kinds = [("auto", QUANTIZE_NONE), *product(ITEM_BYTES, QUANTIZATIONS)]
    try:
        facts, *held = measure_variants(folder, kinds)
    except ModelUnavailable as error:
        log.warning("plan.impossible", reason=error.message)
        return None
    longest = facts.context_len or CONTEXT_LEN
    context_len = min(settings.context_len or CONTEXT_LEN, longest)
    demand = Demand(
        sessions=settings.sessions,
        context_len=context_len,
        prompt_len=min(Demand().prompt_len, context_len),
        chunk_tokens=chunk_tokens,
    )
    return Forecast(
        facts=facts,
        demand=demand,
        objective=settings.objective,
        variants={_precision(variant): variant for variant in held},
        stored=_precision(facts),
    )


def _precision(facts: ModelFacts) -> str:
    """As nodes name it."""
    dtype = _WIRE_NAMES[facts.dtype]
    return dtype if facts.quantize == QUANTIZE_NONE else f"{dtype}/{facts.quantize}"
