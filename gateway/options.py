"""The gateway's flags and variables, as click options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gateway.fleet.settings import FleetSettings
from gateway.generation import GenerationSettings
from gateway.parser_choice import AUTO, REASONING_PARSERS, TOOL_PARSERS, ParserNames
from gateway.response_writer import StreamLimits
from gateway.settings import GatewaySettings, parse_node_url
from gateway.state import BODY_BYTES_MAX
from shared.mesh_options import mesh_options, read_mesh_access
from shared.mesh_tokens import read_secrets
from shared.options import (
    PORT_MAX,
    Parsed,
    add_options,
    cache_dir_option,
    drain_option,
    exit_with_parent_option,
    log_options,
    option,
    parse_bytes,
)
from shared.planning.fleet import OBJECTIVES

DEFAULT_PORT = 8000
_GENERATION = GenerationSettings()
_STREAM = StreamLimits()
_FLEET = FleetSettings()
SESSIONS_MAX = 4096
"""More answers at once than one gateway lets in."""

_WORD = Parsed("text", str)


_MODEL = (
    option(
        "--model",
        "MODEL",
        "A Hugging Face folder, a .gguf file, a hub id such as owner/name, or a catalogue name. "
        "The gateway reads its tokenizer and config, not its weights.",
        required=True,
        metavar="MODEL",
    ),
    cache_dir_option,
    option(
        "--served-model-name",
        "SERVED_MODEL_NAME",
        "The name under which callers ask for the model; may be given several times. 'default' always works.",
        multiple=True,
        metavar="NAME",
        type=_WORD,
        show_default="the model's own name",
    ),
    option(
        "--context-len",
        "CONTEXT_LEN",
        "Tokens that prompt and answer may have together.",
        metavar="TOKENS",
        type=click.IntRange(1),
        show_default="what the model was trained for",
    ),
    option(
        "--tool-parser",
        "TOOL_PARSER",
        "How the model writes tool calls: 'auto' goes by its chat template, 'none' leaves calls in the text, or a name "
        "of docs/parsers.md.",
        default=AUTO,
        metavar="NAME",
        type=click.Choice(TOOL_PARSERS),
    ),
    option(
        "--reasoning-parser",
        "REASONING_PARSER",
        "How the model marks its reasoning: as --tool-parser.",
        default=AUTO,
        metavar="NAME",
        type=click.Choice(REASONING_PARSERS),
    ),
)

_MESH = (
    option(
        "--node",
        "NODES",
        "A node to dial; give one for each. Each is redialled for ever. Others join by dialling the gateway. "
        "http:// is for nodes that speak docs/protocol.md's HTTP binding.",
        multiple=True,
        metavar="ws://HOST:PORT",
        type=Parsed("address", parse_node_url),
        show_default="nodes join",
    ),
    *mesh_options,
)

_PLAN = (
    option(
        "--plan-sessions",
        "PLAN_SESSIONS",
        "Answers in the making at once for which nodes without a range of their own are given one.",
        default=_FLEET.sessions,
        type=click.IntRange(1, SESSIONS_MAX),
    ),
    option(
        "--plan-context-len",
        "PLAN_CONTEXT_LEN",
        "Tokens that each of them may reach.",
        metavar="TOKENS",
        type=click.IntRange(1),
        show_default="4096, or what the model was trained for if that is less",
    ),
    option(
        "--objective",
        "OBJECTIVE",
        "What such plans minimize: latency, the time per token of one answer; throughput, the time of the slowest "
        "stage.",
        default=_FLEET.objective,
        type=click.Choice(OBJECTIVES),
    ),
)

_HTTP = (
    option("--host", "HOST", "Address to serve HTTP on.", default="127.0.0.1", metavar="HOST"),
    option(
        "--port",
        "PORT",
        "Port to serve HTTP on. 0 lets the system choose; the address is printed.",
        default=DEFAULT_PORT,
        type=click.IntRange(0, PORT_MAX),
    ),
    option(
        "--api-key",
        "API_KEYS",
        "A key that callers must present; may be given several times. Prefer the variable.",
        multiple=True,
        metavar="KEY",
        type=_WORD,
        show_default="anyone may call",
    ),
    option(
        "--api-key-file",
        "API_KEY_FILE",
        "Where further keys are, one a line.",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
    ),
    option(
        "--cors-allow-origin",
        "CORS_ALLOW_ORIGIN",
        "A web page's origin that may call, * for any; may be given several times.",
        multiple=True,
        metavar="ORIGIN",
        type=_WORD,
        show_default="pages of this machine and desktop apps; any with API keys set",
    ),
    option("--insecure", "INSECURE", "Listen beyond this machine without API key and mesh token.", is_flag=True),
    option(
        "--max-body-bytes",
        "MAX_BODY_BYTES",
        "The largest request body, such as 8M.",
        default=BODY_BYTES_MAX,
        metavar="BYTES",
        type=Parsed("bytes", parse_bytes),
    ),
    option(
        "--stream-keep-alive-seconds",
        "STREAM_KEEP_ALIVE_SECONDS",
        "A stream with nothing to send gets a comment this often. Its headers go out with its first token, "
        "or with its first comment: until then a failure is a response of its own.",
        default=_STREAM.keep_alive_s,
        type=click.FloatRange(min=0, min_open=True),
    ),
    option(
        "--stream-stall-seconds",
        "STREAM_STALL_SECONDS",
        "A caller that takes nothing of its stream for so long is taken to have left.",
        default=_STREAM.stall_s,
        type=click.FloatRange(min=0, min_open=True),
    ),
)

_LIMITS = (
    option(
        "--queue-max",
        "QUEUE_MAX",
        "Calls that may wait for room on the nodes; more are refused with 429.",
        default=_GENERATION.queue_max,
        type=click.IntRange(0),
    ),
    option(
        "--queue-timeout-seconds",
        "QUEUE_TIMEOUT_SECONDS",
        "How long a call waits for room before it is refused with 429.",
        default=_GENERATION.queue_timeout_s,
        type=click.FloatRange(min=0),
    ),
    option(
        "--route-wait-seconds",
        "ROUTE_WAIT_SECONDS",
        "How long a call that finds layers missing waits for them before it is refused with 503.",
        default=_GENERATION.route_wait_s,
        type=click.FloatRange(min=0),
    ),
    option(
        "--failover-timeout-seconds",
        "FAILOVER_TIMEOUT_SECONDS",
        "How long an answer, or a call in the queue, waits for a lost node or another with its layers before it fails.",
        default=_GENERATION.failover_timeout_s,
        type=click.FloatRange(min=0),
    ),
    option(
        "--prefill-chunk-tokens",
        "PREFILL_CHUNK_TOKENS",
        "The most tokens of a prompt that a node is given at once.",
        default=_GENERATION.prefill_chunk_tokens,
        type=click.IntRange(1),
    ),
    option(
        "--journal-max-bytes",
        "JOURNAL_MAX_BYTES",
        "Memory for what rebuilds a lost node's caches without help of the others, such as 1G.",
        default=_GENERATION.journal_bytes_max,
        metavar="BYTES",
        type=Parsed("bytes", parse_bytes),
    ),
)

_PROCESS = (drain_option("calls"), exit_with_parent_option, *log_options)


def gateway_options(function: Any) -> Any:
    """Add every flag of a gateway to a click command."""
    return add_options(function, (*_MODEL, *_MESH, *_PLAN, *_HTTP, *_LIMITS, *_PROCESS))


def read_settings(options: dict[str, Any]) -> GatewaySettings:
    """The parsed options as settings.

    Raises:
        SettingError: They do not go together.
    """
    settings = GatewaySettings(
        model=options["model"],
        cache_dir=options["cache_dir"],
        served_names=tuple(dict.fromkeys(options["served_model_name"])),
        context_len=options["context_len"],
        parsers=ParserNames(options["tool_parser"], options["reasoning_parser"]),
        nodes=tuple(dict.fromkeys(options["node"])),
        access=read_mesh_access(options),
        host=options["host"],
        port=options["port"],
        api_keys=_api_keys(options),
        cors_origins=tuple(options["cors_allow_origin"]),
        insecure=options["insecure"],
        body_bytes_max=options["max_body_bytes"],
        stream_limits=StreamLimits(
            keep_alive_s=options["stream_keep_alive_seconds"], stall_s=options["stream_stall_seconds"]
        ),
        generation=GenerationSettings(
            prefill_chunk_tokens=options["prefill_chunk_tokens"],
            failover_timeout_s=options["failover_timeout_seconds"],
            route_wait_s=options["route_wait_seconds"],
            queue_max=options["queue_max"],
            queue_timeout_s=options["queue_timeout_seconds"],
            journal_bytes_max=options["journal_max_bytes"],
        ),
        fleet=FleetSettings(
            sessions=options["plan_sessions"],
            context_len=options["plan_context_len"],
            objective=options["objective"],
        ),
        drain_s=options["drain_seconds"],
    )
    settings.check()
    return settings


def _api_keys(options: dict[str, Any]) -> tuple[str, ...]:
    file = options["api_key_file"]
    return (*filter(None, options["api_key"]), *(read_secrets("--api-key-file", file) if file else ()))
