"""Runs llm-comply, and knows which of its tests do not apply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXEMPT = {
    "chat-image-input": "the served model reads text",
    "chat-reasoning-summary": "sends the Responses API's `reasoning` to chat completions, where it is refused by name",
    "image-input": "the served model reads text",
    "anth-image-input": "the served model reads text",
    "anth-thinking-display": "tried on models named claude only",
}
TIMEOUT_S = 100


def run_comply(base_url: str, model: str, api_format: str) -> dict[str, tuple[str, list[str]]]:
    """Status and complaints of each test by its id."""
    command = Path(sys.executable).with_name("llm-comply")
    arguments = ["--format", api_format, "-u", base_url, "-k", "none", "-m", model, "--json"]
    ended = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    report = json.loads(ended.stdout)
    return {result["id"]: (result["status"], result.get("errors") or []) for result in report["results"]}


def check_report(results: dict[str, tuple[str, list[str]]]) -> None:
    """Everything that applies has passed, and what is exempt exists."""
    assert results
    failed = {name: result for name, result in results.items() if result[0] != "passed" and name not in EXEMPT}
    assert not failed, failed
