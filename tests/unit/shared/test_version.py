"""One version, wherever it is said."""

from __future__ import annotations

import tomllib
from pathlib import Path

from click.testing import CliRunner

from shared.cli.__main__ import main
from shared.version import SOFTWARE, VERSION


def test_the_version_is_the_packages_own():
    """pyproject.toml and the code agree, and ``meshnet --version`` says it."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert CliRunner().invoke(main, ["--version"]).output.strip() == SOFTWARE
