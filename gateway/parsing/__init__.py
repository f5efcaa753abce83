"""Incremental parsers of model output: text in, content, reasoning and tool calls out."""
