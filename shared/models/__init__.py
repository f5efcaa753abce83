"""Where a model comes from, and what its folder says, without loading a weight or importing torch."""
