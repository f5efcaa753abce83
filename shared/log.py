"""Log configuration, called once by each `__main__`: people read a terminal, programs read JSON lines."""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog

QUIET_LOGGERS = ("websockets", "websockets.client", "websockets.server", "asyncio", "httpx", "httpcore")
"""Libraries that log each connection at INFO and, at DEBUG, the bytes they carry: prompts and tensors."""


def configure_logging(*, level: str = "info", json: bool | None = None) -> None:
    """Send this process's events, and those of the libraries it uses, to standard error.

    Args:
        level: Name of the least severe level shown, in any case.
        json: One JSON object a line; None decides by whether standard error is a terminal.

    Raises:
        ValueError: If there is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}")
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_last_processors(as_json=as_json))
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def _last_processors(*, as_json: bool) -> list[structlog.typing.Processor]:
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if not as_json:
        plain = structlog.dev.plain_traceback  # the default shows local variables: prompts, tokens, tensors
        return [remove, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [
        remove,
        structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(serializer=_dump_json),
    ]


def _dump_json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
