"""llm-comply on chat completions."""

from __future__ import annotations

from comply import check_report, run_comply


def test_chat_completions(server):
    """Every test that applies to a text model."""
    check_report(run_comply(server.base_url, server.reasoning_model, "openai-chat"))
