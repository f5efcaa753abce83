"""Replays the fixtures of `canitoolcall` through our parsers, cut in several ways, and judges what comes out."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Family as FixtureFamily
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import Observation, ParseResult, Status, StreamAccumulator

from gateway.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from gateway.parsing.families import create_parser
from tests.support.parser_events import random_pieces

FAMILIES_OF: dict[str, tuple[str, str | None]] = {
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek_v3", None),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek_v3", "think"),
    "deepseek-ai/DeepSeek-V": ("deepseek_dsml", "think"),
    "google/gemma-4": ("gemma4", "gemma4"),
    "zai-org/GLM": ("glm", "think"),
    "openai/gpt-oss": ("harmony", "harmony"),
    "moonshotai/Kimi-K3": ("kimi_k3", "kimi_k3"),
    "moonshotai/Kimi-K2-Instruct": ("kimi_k2", None),
    "moonshotai/Kimi-K2": ("kimi_k2", "think"),
    "meta-llama/Llama-3": ("llama3_json", None),
    "meta-llama/Llama-4": ("pythonic", None),
    "mistralai/Magistral-Small-2506": ("mistral", "think"),
    "mistralai/Mi": ("mistral", "mistral_think"),
    "mistralai/": ("mistral", "mistral_think"),
    "Qwen/Qwen3-Coder": ("qwen3_xml", None),
    "Qwen/Qwen3.": ("qwen3_xml", "think"),
    "Qwen/Qwen3-4B-Instruct": ("hermes", None),
    "Qwen/Qwen3": ("hermes", "think"),
}
"""Beginnings of model names, and the families of their calls and their reasoning; the first that fits counts."""

CHUNK_SEEDS = range(3)


@dataclass(frozen=True)
class Case:
    """One fixture's outcome.

    Attributes:
        fixture: What was replayed.
        status: The worst of all checks over all cuts.
        detail: What the first failing check says.
    """

    fixture: Fixture
    status: Status
    detail: str


def families_of(model: str) -> tuple[str, str | None]:
    """Return the names of a model's families, for calls and for reasoning."""
    return next(names for start, names in FAMILIES_OF.items() if model.startswith(start))


def prompt_tail_of(fixture: Fixture, family: FixtureFamily | None) -> str:
    """Return the end of the prompt that a fixture's output continues."""
    if fixture.generation_prompt is not None or family is None:
        return fixture.generation_prompt or ""
    reference = family.reference_for(fixture.reference_model)
    return (reference.default_generation_prompt if reference else None) or ""


def cuts_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield ways to cut a text, each with a name: whole, character by character, and at random."""
    yield "whole", [text]
    yield "characters", list(text)
    for seed in CHUNK_SEEDS:
        yield f"random {seed}", random_pieces(text, random.Random(seed))


def parse(fixture: Fixture, pieces: list[str], *, whole_calls: bool) -> ParseResult:
    """Parse one fixture's output, given in pieces, as a client that gathers the events would see it."""
    tools, reasoning = families_of(fixture.reference_model)
    parser = create_parser(
        tool_family=tools,
        reasoning_family=reasoning,
        tools=fixture.tools,
        prompt_tail=prompt_tail_of(fixture, family_for(fixture)),
        whole_calls=whole_calls,
    )
    seen = StreamAccumulator()
    for piece in pieces:
        _gather(seen, parser.push(piece))
    _gather(seen, parser.finish())
    return seen.result()


def judge(fixture: Fixture, *, whole_calls: bool) -> Case:
    """Replay one fixture in every cut and run the suite's checks on what came out."""
    parses = {name: parse(fixture, pieces, whole_calls=whole_calls) for name, pieces in cuts_of(fixture.raw_output)}
    observed = Observation(nonstream=parses.pop("whole"), streams=parses)
    rows = run_checks(fixture, family_for(fixture), observed)
    detail = next((row.detail or "" for row in rows if row.status is not Status.PASS), "")
    return Case(fixture, case_status(rows), detail)


@functools.cache
def judge_all(*, whole_calls: bool) -> tuple[Case, ...]:
    """Judge every fixture of the installed suite."""
    return tuple(judge(fixture, whole_calls=whole_calls) for fixture in load_fixtures())


def _gather(seen: StreamAccumulator, events: list[Event]) -> None:
    for event in events:
        match event:
            case Content(text):
                seen.add_content(text)
            case Reasoning(text):
                seen.add_reasoning(text)
            case ToolCallBegin(index, name, _):
                seen.add_tool_call(index, name)
            case ToolCallArguments(index, text):
                seen.add_tool_call(index, arguments=text)
