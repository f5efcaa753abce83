"""Anthropic's Messages API: what it reads and writes."""
