"""`make conformance`: other people's clients against a scripted mesh, and a few calls against a real model.

The clients live in an environment of their own, which the Makefile makes; this module, in the main one, starts the
servers. One suite is one feature: ``clients/test_FEATURE*.py`` with Python's clients, ``node/FEATURE.test.mjs`` with
Node's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.servers import serving_real_model, serving_script

FOLDER = Path(__file__).parent
SUITE_TIMEOUT_S = 600.0
"""Each suite takes seconds; a server that hangs must not hang whoever waits for this."""


def features() -> list[str]:
    """The suites there are."""
    python = {path.stem.removeprefix("test_") for path in (FOLDER / "clients").glob("test_*.py")}
    node = {path.name.removesuffix(".test.mjs") for path in (FOLDER / "node").glob("*.test.mjs")}
    return sorted(python | node)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv-conformance"), help="where Python's clients are")
    parser.add_argument("--only", nargs="+", choices=features(), metavar="FEATURE", help=f"of {', '.join(features())}")
    parser.add_argument("--skip-real-model", action="store_true", help="the scripted mesh alone")
    return parser.parse_args(arguments)


def run_clients(venv: Path, suites: Sequence[str], base_url: str, model: str) -> bool:
    """Run these suites of both languages; returns whether all passed. What they print is shown as it comes."""
    files = [path for suite in suites if (path := FOLDER / "clients" / f"test_{suite}.py").exists()]
    scripts = [path for suite in suites if (path := FOLDER / "node" / f"{suite}.test.mjs").exists()]
    clients = FOLDER / "clients"
    pytest = [venv / "bin" / "python", "-m", "pytest", "-q", "-c", clients / "pytest.ini", "--confcutdir", clients]
    node = ["node", "--test", "--test-timeout=60000", "--test-reporter=spec"]
    env = _client_env(venv, base_url, model)
    passed = True
    for command, paths in ((pytest, files), (node, scripts)):
        if paths:
            sys.stdout.flush()
            passed &= not subprocess.run([*command, *paths], env=env, timeout=SUITE_TIMEOUT_S, check=False).returncode
    return passed


def _client_env(venv: Path, base_url: str, model: str) -> dict[str, str]:
    """Nothing of the caller's own accounts reaches the clients, and nothing is fetched at run time.

    Node may be in the clients' own environment, where the machine has none that is new enough.
    """
    private = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "MESHNET_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(private)}
    return {
        **env,
        "PATH": f"{venv.absolute() / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CONFORMANCE_BASE_URL": base_url,
        "CONFORMANCE_MODEL": model,
        "CONFORMANCE_REASONING_MODEL": f"{model}-deepseek-r",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONPATH": str(FOLDER / "clients"),
    }


def main() -> int:
    """Run everything; returns 1 if a suite has failed."""
    arguments = parse_arguments()
    suites = arguments.only or features()
    started_at = time.monotonic()
    with serving_script(FOLDER / "script.json") as served:
        passed = run_clients(arguments.venv, suites, *served)
    if not arguments.skip_real_model:
        sys.stdout.write("\nthe default model, on two nodes:\n")
        with tempfile.TemporaryDirectory() as logs, serving_real_model(Path(logs)) as served:
            passed &= run_clients(arguments.venv, ["smoke"], *served)
    took_s = time.monotonic() - started_at
    sys.stdout.write(f"\nconformance {'passed' if passed else 'FAILED'} after {took_s:.0f} s\n")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
