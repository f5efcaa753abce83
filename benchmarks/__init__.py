"""Benchmarks: each compares side by side in one run, and writes what it saw to `benchmarks/results`."""
