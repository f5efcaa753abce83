"""compose.yaml, the Kubernetes manifests, the systemd units and the Dockerfiles: valid, and true to the programs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from gateway.metrics import metrics_text
from tests.support.deployment import (
    COMPOSE,
    DOCKERFILES,
    K8S,
    UNITS,
    flags_in,
    flags_of,
    interpreted_compose,
    manifests,
    variables_of,
)
from tests.support.fleet import REPO
from tests.support.memory_mesh import scripted_mesh

SCHEMA = Path(__file__).parents[1] / "data" / "compose-spec" / "compose-spec.json"
KUBERNETES = "1.31"
NOT_YET = {"--join"} - flags_of("shard")
"""Flags that the files use before the programs have them."""


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine is told."""
    return interpreted_compose(tmp_path_factory.mktemp("compose"), MESHNET_MODEL="some/model")


def seconds(duration: str) -> float:
    """A duration of one unit."""
    return float(duration.removesuffix("s"))


def test_the_compose_file_is_one():
    """By the specification's own schema, which is older than the top-level name."""
    document = yaml.safe_load(COMPOSE.read_text())
    assert document.pop("name") == "meshnet"
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(document)


def test_each_service_is_confined_watched_and_drained(compose: dict[str, Any]):
    """No root file system to write to, no capability, a health check, a restart, and time for answers to end."""
    assert set(compose["services"]) == {"gateway", "shard-cpu", "shard-gpu"}
    for service in compose["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert seconds(service["stop_grace_period"]) > float(service["environment"]["MESHNET_DRAIN_SECONDS"]) + 5


def test_clients_and_mesh_have_a_network_each(compose: dict[str, Any]):
    """Only the gateway is in both and publishes a port, on loopback unless told; only it is given the API keys."""
    services = compose["services"]
    assert sorted(services["gateway"]["networks"]) == ["clients", "mesh"]
    assert services["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    assert sorted(services["gateway"]["secrets"]) == ["api_keys", "mesh_token"]
    for name in ("shard-cpu", "shard-gpu"):
        assert list(services[name]["networks"]) == ["mesh"]
        assert services[name]["secrets"] == ["mesh_token"]
        assert "ports" not in services[name]
        assert "container_name" not in services[name]  # so that --scale works
    assert services["gateway"]["command"][:3] == ["gateway", "--model", "some/model"]


def test_the_gpu_is_asked_for_in_its_profile_alone(compose: dict[str, Any]):
    """A machine without one starts the rest."""
    services = compose["services"]
    device = services["shard-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert services["shard-gpu"]["profiles"] == ["gpu"]
    assert all("deploy" not in services[name] for name in ("gateway", "shard-cpu"))


def test_composed_commands_use_flags_and_variables_that_there_are(compose: dict[str, Any]):
    """A flag that is renamed breaks this test, not a deployment."""
    for service in compose["services"].values():
        name, *arguments = service["command"]
        assert set(flags_in(arguments)) - NOT_YET <= flags_of(name)
        assert set(service["environment"]) <= variables_of(name)


@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda manifest: f"{manifest['kind']}/{manifest['metadata']['name']}"
)
def test_a_manifest_is_one(manifest: dict[str, Any]):
    """By Kubernetes' own schemas, strictly: no field that it would drop."""
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl here")
def test_the_kustomization_builds():
    """With the images' versions, and the settings that the workloads refer to, under the name it gives them."""
    built = subprocess.run(["kubectl", "kustomize", K8S], capture_output=True, text=True, check=True, timeout=60).stdout
    documents = list(yaml.safe_load_all(built))
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    settings = next(document["metadata"]["name"] for document in documents if document["kind"] == "ConfigMap")
    assert built.count(f"name: {settings}") == 3
    assert "image: meshnet-gateway:0.1.0" in built
    assert "image: meshnet-node:0.1.0-cpu" in built


def workloads() -> dict[str, dict[str, Any]]:
    """Pods' templates by the program that they run."""
    kinds = [manifest for manifest in manifests() if manifest["kind"] in ("Deployment", "StatefulSet")]
    return {
        manifest["spec"]["template"]["spec"]["containers"][0]["args"][0]: manifest["spec"]["template"]
        for manifest in kinds
    }


def kustomized_settings() -> dict[str, str]:
    """The variables that every pod gets."""
    generator = yaml.safe_load((K8S / "kustomization.yaml").read_text())["configMapGenerator"][0]
    return dict(literal.split("=", 1) for literal in generator["literals"])


@pytest.mark.parametrize("name", ["gateway", "shard"])
def test_a_pods_command_and_variables_are_the_programs(name: str):
    """And SIGTERM comes early enough for what goes on to end."""
    spec = workloads()[name]["spec"]
    container = spec["containers"][0]
    assert set(flags_in(container["args"])) - NOT_YET <= flags_of(name)
    own = {entry["name"] for entry in container["env"] if entry["name"].startswith("MESHNET_")}
    assert own | set(kustomized_settings()) <= variables_of(name)
    pause_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert spec["terminationGracePeriodSeconds"] > pause_s + float(kustomized_settings()["MESHNET_DRAIN_SECONDS"]) + 5
    assert spec["securityContext"]["runAsNonRoot"]


def test_a_nodes_pod_is_not_given_the_api_keys():
    """Neither the variable nor the file."""
    pod = json.dumps(workloads()["shard"])
    assert "api-keys" not in pod
    assert "API_KEY" not in pod


def test_selectors_and_targets_meet():
    """Services, budgets and the autoscaler are about pods that there are."""
    labels = [template["metadata"]["labels"] for template in workloads().values()]
    for manifest in manifests():
        spec = manifest["spec"]
        if manifest["kind"] == "Service":
            assert spec["selector"] in labels
        elif manifest["kind"] == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"] in labels
        elif manifest["kind"] == "HorizontalPodAutoscaler":
            names = {(other["kind"], other["metadata"]["name"]) for other in manifests()}
            assert (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) in names


async def test_the_autoscaler_goes_by_a_metric_that_there_is():
    """As the gateway names it."""
    scaler = next(manifest for manifest in manifests() if manifest["kind"] == "HorizontalPodAutoscaler")
    async with scripted_mesh() as mesh:
        text = metrics_text(mesh.view.snapshot())
    assert f"\n{scaler['spec']['metrics'][0]['object']['metric']['name']} 0\n" in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_one_and_uses_variables_that_there_are(unit: Path, tmp_path: Path):
    """By systemd itself where there is one; the program's path is replaced by one that exists here."""
    text = unit.read_text()
    name = re.search(r"^ExecStart=/opt/meshnet/bin/meshnet (\w+)$", text, re.MULTILINE)
    assert name is not None
    assert set(re.findall(r"(MESHNET_\w+)=", text)) <= variables_of(name[1])
    assert "RestartPreventExitStatus=2" in text
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze here")
    copy = tmp_path / unit.name
    copy.write_text(text.replace("/opt/meshnet/bin/meshnet", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], check=False, capture_output=True, text=True, timeout=60
    )
    assert [line for line in verified.stderr.splitlines() if unit.name in line] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_pinned_staged_and_runs_as_nobody(dockerfile: Path):
    """What is copied is not ignored, and the last stage runs under a number that is not root's."""
    text = dockerfile.read_text()
    last = text.split("\nFROM ")[-1]
    assert text.count("\nFROM python:${PYTHON}") == 2
    assert re.search(r"^ARG PYTHON=3\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    assert "USER 10001:10001" in last
    assert "pip install" not in last
    kept = {line.removeprefix("!") for line in (REPO / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert set(copied.split()) <= kept
        assert all((REPO / name).exists() for name in copied.split())


def test_every_dependency_is_pinned():
    """Of both images; torch in the node's Dockerfile, where its build is chosen."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [Requirement(text) for text in (*project["dependencies"], *extras["gateway"], *extras["shard"])]
    pins = dict(
        line.split("==") for line in (REPO / "docker" / "constraints.txt").read_text().splitlines() if "==" in line
    )
    for requirement in needed:
        name = requirement.name.lower().replace("_", "-")
        if name != "torch":
            assert requirement.specifier.contains(pins[name]), f"{name} {pins[name]} is not {requirement.specifier}"
    torch = next(requirement for requirement in needed if requirement.name == "torch")
    version = re.search(r"^ARG TORCH=(\S+)$", (REPO / "docker" / "node.Dockerfile").read_text(), re.MULTILINE)
    assert version is not None
    assert torch.specifier.contains(version[1])
