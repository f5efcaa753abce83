"""Where a model comes from, without torch."""
