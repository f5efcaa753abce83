"""The files in which meshnet is deployed, read as those read them who run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from tests.support.fleet import REPO
from tests.support.settings_docs import documented_commands

COMPOSE = REPO / "compose.yaml"
K8S = REPO / "deploy" / "k8s"
UNITS = sorted((REPO / "deploy" / "systemd").glob("*.service"))
DOCKERFILES = sorted((REPO / "docker").glob("*.Dockerfile"))


def interpreted_compose(folder: Path, **variables: str) -> dict[str, Any]:
    """`compose.yaml` with anchors and variables resolved, by podman-compose.

    Args:
        folder: Where a stand-in for the engine goes, which `config` only asks for its version.
        variables: The environment that the file is interpreted in.
    """
    engine = folder / "podman"
    engine.write_text("#!/bin/sh\necho podman version 5.4.0\n")
    engine.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = [sys.executable, "-m", "podman_compose", "--profile", "gpu", "-f", str(COMPOSE), "config"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return dict(yaml.safe_load(done.stdout))


def manifests() -> list[dict[str, Any]]:
    """Every Kubernetes resource that the kustomization names, as written."""
    kustomization = yaml.safe_load((K8S / "kustomization.yaml").read_text())
    files = [(K8S / name).read_text() for name in kustomization["resources"]]
    return [document for text in files for document in yaml.safe_load_all(text)]


def program(name: str) -> click.Command:
    """The command behind `meshnet gateway` or `meshnet shard`."""
    return next(entry.command for entry in documented_commands() if entry.call == f"python -m {name}")


def flags_of(name: str) -> set[str]:
    """Every flag that a program takes."""
    return {flag for parameter in program(name).params for flag in (*parameter.opts, *parameter.secondary_opts)}


def variables_of(name: str) -> set[str]:
    """Every variable that a program reads."""
    return {str(parameter.envvar) for parameter in program(name).params}


def flags_in(arguments: list[str]) -> Iterator[str]:
    """The flags of a command line, without their values."""
    return (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
