"""Logs: JSON lines for programs, text for people, nothing that libraries say about the bytes they carry."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from shared.log import QUIET_LOGGERS, configure_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Put the process's logging back as pytest had it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)


def log_a_failure(prompt: str) -> None:
    """Log an exception raised in a frame that holds a prompt."""
    try:
        fail(len(prompt))
    except RuntimeError:
        structlog.get_logger().exception("link.failed")


def fail(_size: int) -> None:
    """Raise."""
    raise RuntimeError("broken")


def test_events_are_json_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str]):
    """Without a terminal each event, ours or a library's, is one object with its keys, level and time."""
    configure_logging(level="info")
    structlog.get_logger("gateway").info("request.finished", tokens=3, path=b"x")
    logging.getLogger("some.library").warning("it is %s", "late")
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["tokens"], ours["level"], ours["logger"]) == ("request.finished", 3, "info", "gateway")
    assert ours["timestamp"].endswith("Z")
    assert (theirs["event"], theirs["level"]) == ("it is late", "warning")


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]):
    """A traceback is part of the JSON object, not loose lines behind it."""
    configure_logging(json=True)
    log_a_failure("")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"][0]["exc_value"] == "broken"


def test_a_traceback_never_shows_local_values(capsys: pytest.CaptureFixture[str]):
    """Prompts, tokens and tensors live in local variables: a frame's locals are not logged in either form."""
    for as_json in (True, False):
        configure_logging(json=as_json)
        log_a_failure("the user's " + "secret")
        assert "user's secret" not in capsys.readouterr().err


def test_people_get_text(capsys: pytest.CaptureFixture[str]):
    """On request an event is a line for people."""
    configure_logging(json=False)
    structlog.get_logger().info("node.loaded", layers="0:12")
    line = capsys.readouterr().err
    assert "node.loaded" in line
    assert "layers=0:12" in line
    assert not line.startswith("{")


def test_the_level_holds_and_libraries_stay_quiet(capsys: pytest.CaptureFixture[str]):
    """Below the level nothing is shown, and even at debug no library writes out what it carries."""
    configure_logging(level="warning")
    structlog.get_logger().info("not.shown")
    configure_logging(level="DEBUG")
    logging.getLogger("websockets.client").debug("> BINARY a prompt")
    logging.getLogger("websockets.server").info("connection open")
    structlog.get_logger().debug("is.shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "is.shown"


def test_an_unknown_level_is_refused():
    """A wrong setting is a `ValueError`, not silence."""
    with pytest.raises(ValueError, match="unknown log level"):
        configure_logging(level="loud")
