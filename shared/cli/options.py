"""The flags and variables of `meshnet up`, `demo`, `pull`, `plan` and `drain`, as click options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shared.mesh_options import file_option
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
    quantize_option,
)
from shared.planning.fleet import OBJECTIVES

NODES_MAX = 512
"""More processes than any model has layers."""
SESSIONS_MAX = 4096
"""More answers at once than one gateway lets in."""
CONTEXT_LEN_MAX = 1 << 24
"""Longer than any model was trained for."""
DEMO_TOKENS_MIN = 8
"""Of fewer, none is in the middle."""
DEMO_PROMPT = "In two sentences, why must a distributed system expect that machines fail?"


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
    quantize_option,
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


_DEMO = (
    option(
        "--model",
        "MODEL",
        "A Hugging Face folder, a .gguf file, a hub id such as owner/name, or a catalogue name.",
        default=DEFAULT_MODEL,
        metavar="MODEL",
    ),
    option("--prompt", "DEMO_PROMPT", "What is asked.", default=DEMO_PROMPT, metavar="TEXT"),
    option(
        "--max-tokens",
        "DEMO_MAX_TOKENS",
        "The most tokens that the answer may have.",
        default=256,
        type=click.IntRange(DEMO_TOKENS_MIN, CONTEXT_LEN_MAX),
    ),
    option("--port", "PORT", "The gateway's port.", default=8010, type=click.IntRange(1, PORT_MAX)),
    option(
        "--threads",
        "THREADS",
        "Threads that compute in each node.",
        type=click.IntRange(1, THREADS_MAX),
        show_default="the cores divided by the nodes, at least 1",
    ),
    cache_dir_option,
    exit_with_parent_option,
)


def demo_options(function: Any) -> Any:
    """Add every flag of `meshnet demo` to a click command."""
    return add_options(function, _DEMO)


DEFAULT_GATEWAY = "http://127.0.0.1:8000"

_gateway_access = (
    option(
        "--mesh-token",
        "MESH_TOKEN",
        "The mesh token, or an API key of the gateway. Prefer the variable or a file: other users can read a command "
        "line.",
        metavar="TOKEN",
    ),
    file_option("--mesh-token-file", "MESH_TOKEN_FILE", "Where it is instead; of several lines the first counts."),
    file_option(
        "--mesh-ca", "MESH_CA", "Authorities, PEM, that are trusted beside the system's when --gateway is https://."
    ),
)

_DRAIN = (
    option(
        "--gateway",
        "GATEWAY",
        "The gateway that the node serves.",
        default=DEFAULT_GATEWAY,
        metavar="http://HOST:PORT",
    ),
    *_gateway_access,
)

_PLAN = (
    option(
        "--gateway",
        "GATEWAY",
        "Show the plan that is in force at this gateway, instead of making one; beside the "
        "next three only --json counts then.",
        metavar="http://HOST:PORT",
    ),
    *_gateway_access,
    option(
        "--model",
        "MODEL",
        "A Hugging Face folder, a .gguf file, a hub id such as owner/name, or a catalogue name.",
        default=DEFAULT_MODEL,
        metavar="MODEL",
    ),
    option(
        "--machines",
        "PLAN_MACHINES",
        "A YAML file that describes the machines: docs/planning.md has its fields.",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
    ),
    option(
        "--objective",
        "OBJECTIVE",
        "What to minimize: latency, the time per token of one answer; throughput, the time of the slowest stage.",
        default="latency",
        type=click.Choice(OBJECTIVES),
    ),
    option(
        "--sessions",
        "PLAN_SESSIONS",
        "Answers in the making at once: each has its cache on every hop.",
        default=8,
        type=click.IntRange(1, SESSIONS_MAX),
    ),
    option(
        "--context-len",
        "CONTEXT_LEN",
        "Tokens that prompt and answer may have together.",
        metavar="TOKENS",
        type=click.IntRange(1, CONTEXT_LEN_MAX),
        show_default="4096, or what the model was trained for if that is less",
    ),
    option(
        "--prompt-len",
        "PLAN_PROMPT_LEN",
        "Length of the prompt whose time to first token is predicted.",
        metavar="TOKENS",
        type=click.IntRange(1, CONTEXT_LEN_MAX),
        show_default="512, or the context if that is less",
    ),
    dtype_option,
    quantize_option,
    option(
        "--replicas/--no-replicas",
        "PLAN_REPLICAS",
        "Let machines that the route leaves over hold second copies of a range.",
        default=True,
    ),
    cache_dir_option,
    option("--json", "PLAN_JSON", "Print JSON instead of text.", is_flag=True),
)


def drain_options(function: Any) -> Any:
    """Add every flag of `meshnet drain` to a click command."""
    return add_options(function, _DRAIN)


def plan_options(function: Any) -> Any:
    """Add every flag of `meshnet plan` to a click command."""
    return add_options(function, _PLAN)
