"""The HTTP endpoints, one module per family."""
