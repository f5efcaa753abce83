"""Which release of a library the tests would use: `python -m tests.support.library_release 'transformers==5.17.*'`.

Fails when it is another one, so that a run against an old release is one.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from packaging.requirements import Requirement


def main() -> None:
    """Compare one requirement with what is installed."""
    wanted = Requirement(sys.argv[1])
    found = version(wanted.name)
    if found not in wanted.specifier:
        raise SystemExit(f"error: {wanted} is wanted, {found} is found")
    sys.stdout.write(f"{wanted.name} {found}\n")


if __name__ == "__main__":
    main()
