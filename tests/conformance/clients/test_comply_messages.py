"""llm-comply on Anthropic's Messages API."""

from __future__ import annotations

from comply import check_report, run_comply


def test_messages(server):
    """Every test that applies to a text model."""
    check_report(run_comply(server.base_url, server.reasoning_model, "anthropic"))
