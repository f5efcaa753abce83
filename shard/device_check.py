"""`python -m shard.device_check DEVICE`: whether a node here could compute on a device, before anything is fetched.

A program of its own, because `meshnet up` has no torch to ask.
"""

from __future__ import annotations

import sys

from shared.errors import LoadFailed
from shared.options import SettingError


def check_device(name: str) -> None:
    """Whether a device is there. What is always there costs no import of torch.

    Raises:
        SettingError: It is unknown or absent; says what there is.
    """
    if name in ("auto", "cpu"):
        return
    from shard.device import choose_device  # noqa: PLC0415 - torch takes seconds to import

    try:
        choose_device(name)
    except LoadFailed as error:
        raise SettingError("--device", error.message) from error


def main() -> int:
    """Exit with 0, or with 2 and the reason."""
    try:
        check_device(sys.argv[1])
    except SettingError as error:
        sys.stderr.write(f"{error.reason}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
