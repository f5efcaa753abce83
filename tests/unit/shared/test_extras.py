"""A side that is started without its packages says which, in one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shared.extras import EXTRAS, missing_packages
from tests.support.fleet import REPO, child_env

HIDE = """\
import runpy, sys
hidden = {hidden!r}
class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.argv = [{module!r}, "--help"]
runpy.run_module({module!r}, run_name="__main__")
"""


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_lists_are_those_of_pyproject(extra: str):
    """A dependency that is added there and not here would end in a traceback again."""
    project = tomllib.loads((Path(REPO) / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~;\[ ]", entry)[0] for entry in project["optional-dependencies"][extra]}
    assert declared == set(EXTRAS[extra])
    assert missing_packages(extra) == []


@pytest.mark.parametrize(
    ("module", "hidden", "words"),
    [
        ("gateway", ["litestar", "uvicorn"], "litestar, uvicorn not installed here; in meshnet's checkout: pip"),
        ("shard", ["torch"], "torch not installed here; in meshnet's checkout: pip install 'torch==2.13.0', then pip"),
    ],
)
def test_a_missing_extra_is_one_sentence(module: str, hidden: list[str], words: str):
    """No traceback, exit code 2, and what to install."""
    source = HIDE.format(hidden=set(hidden), module=module)
    ended = subprocess.run(
        [sys.executable, "-c", source],
        cwd=REPO,
        env=child_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == f"error: python -m {module} needs meshnet's {module} extra: {words} install '.[{module}]'\n"
