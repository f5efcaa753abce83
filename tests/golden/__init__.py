"""golden tests."""
