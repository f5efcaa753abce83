"""tests tests."""
