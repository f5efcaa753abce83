"""What a program calls itself in its usage lines."""

from __future__ import annotations

from shared.program_name import STARTED_BY_MESHNET, program_name


def test_the_name_follows_how_it_was_started() -> None:
    """By `meshnet`, once; what it starts in turn was not started by `meshnet`."""
    environ = {STARTED_BY_MESHNET: "1", "PATH": "/bin"}
    assert program_name("shard", environ) == "meshnet shard"
    assert environ == {"PATH": "/bin"}
    assert program_name("shard", environ) == "python -m shard"
