"""Completions: raw prompts continued, as ``POST /v1/completions`` has them."""
