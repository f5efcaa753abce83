"""The clients' suites run in an environment of their own (`python -m tests.conformance`), not with the tests."""

collect_ignore = ["clients", "node"]
