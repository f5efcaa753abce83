"""support tests."""
