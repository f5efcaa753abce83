"""`python -m benchmarks [NAME …]`: run benchmarks on the default model and write their results."""

from __future__ import annotations

import argparse
import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.record import write
from tests.support.default_model import default_model_folder

NAMES = ("stage", "decode", "context", "hop", "memory", "sampling", "gateway")


def main() -> None:
    """Run each named benchmark, all of them by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help=f"which ones (default: all): {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    model = default_model_folder()
    for name in names:
        write(name, importlib.import_module(f"benchmarks.{name}").run(model))


if __name__ == "__main__":
    main()
