"""The gateway's core under random faults: `python -m tests.simulation`."""
