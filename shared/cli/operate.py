"""`meshnet drain` and `meshnet plan --gateway`: what is asked of a gateway that runs."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import httpx

from shared.mesh_tokens import MeshTokens
from shared.options import SettingError
from shared.planning.units import duration_text, size_text
from shared.tls import create_dial_context

DRAIN_S_MAX: Final = 600.0
"""Longer than a gateway takes to replace a node, to move its sessions and to see it end."""
ANSWER_S_MAX: Final = 30.0
_SOURCES: Final = {"measurement": "its own measurement", "steps": "its steps"}


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """How a gateway is reached.

    Args:
        url: Its address.
        token: The mesh token, or an API key.
        context: TLS; None trusts what the system trusts.
    """

    url: str
    token: str | None = None
    context: ssl.SSLContext | None = None

    @classmethod
    def create(cls, url: str, token: str | None, token_file: Path | None, ca: Path | None) -> GatewayAccess:
        """From flags.

        Raises:
            click.UsageError: A file cannot be used, or a token was given twice.
        """
        try:
            presented = MeshTokens([token] if token else [], token_file).presented()
            return cls(url, presented, create_dial_context(ca, None, None) if ca is not None else None)
        except SettingError as error:
            raise click.UsageError(str(error)) from error


def run_drain(node: str, gateway: GatewayAccess) -> None:
    """Take a node out of service and say what came of it.

    Raises:
        click.ClickException: The gateway cannot be reached or refuses; says why.
    """
    click.echo(f"asking {gateway.url} to drain {node}: others take its place, and its sessions move to them")
    drained = _call("POST", gateway, f"/mesh/nodes/{quote(node, safe='')}/drain", DRAIN_S_MAX)
    left = drained["sessions_left"]
    moved = "all its sessions have moved" if not left else f"{left} of its sessions had not moved and are rebuilt"
    gone = "it has ended" if drained["is_gone"] else "it was told to end and has not yet"
    click.echo(f"drained {node} in {drained['took_s']:.1f} s: {moved}; {gone}")


def run_live_plan(gateway: GatewayAccess, *, as_json: bool) -> None:
    """Print the plan that is in force at a gateway.

    Raises:
        click.ClickException: The gateway cannot be reached or refuses, or gives its nodes no ranges.
    """
    mesh = _call("GET", gateway, "/mesh", ANSWER_S_MAX)
    plan = mesh.get("plan")
    if plan is None:
        raise click.ClickException(f"{gateway.url} makes no plans")
    click.echo(json.dumps(plan, indent=2) if as_json else "\n".join(live_plan_text(mesh, plan)))


def live_plan_text(mesh: dict[str, Any], plan: dict[str, Any]) -> Iterator[str]:
    """The plan as lines for people."""
    if plan["sessions"] is not None:
        yield (
            f"{mesh['num_layers']} layers, planned for {plan['objective']}; "
            f"{plan['sessions']} sessions of {plan['context_len']} tokens"
        )
    yield f"  in force      {_since(plan)}"
    yield f"  one answer    {_rate(plan['predicted_tokens_per_s'])} predicted"
    yield f"                {_rate(plan['observed_tokens_per_s'])} observed in the last minute"
    if plan["predicted_first_token_ms"] is not None:
        first_s = plan["predicted_first_token_ms"] / 1000
        yield f"  first token   {duration_text(first_s)} predicted after a prompt of {plan['prompt_len']} tokens"
    if plan["pending"]:
        yield f"  pending       {plan['pending']}"
    if not mesh["ready"]:
        yield f"  not ready     {mesh['reason']}"
    yield ""
    for stage in plan["stages"]:
        for number, node in enumerate(stage["nodes"]):
            yield _node_line(stage["layers"], node, is_replica=number > 0)
            yield f"    {_times(node)}"
            if not node["given"]:
                yield f"    {_link(node)}"
    for name in plan["left_out"]:
        yield f"{name}  holds nothing"


def _since(plan: dict[str, Any]) -> str:
    if plan["reason"] is None:
        return "none"
    minutes = round(plan["adopted_s_ago"] / 60)
    return f"for {f'{minutes} min' if minutes else 'less than a minute'}: {plan['reason']}"


def _rate(tokens_per_s: float | None) -> str:
    return "not known" if tokens_per_s is None else f"{tokens_per_s:.3g} tokens/s"


def _node_line(layers: list[int], node: dict[str, Any], *, is_replica: bool) -> str:
    line = f"{node['node']}  {'replica ' if is_replica else ''}layers {layers[0]}:{layers[1]}, {node['state']}"
    if node["given"]:
        return f"{line}, a range of its own"
    return (
        f"{line}, {size_text(node['weights_bytes'])} weights + {size_text(node['kv_bytes'])} K/V of "
        f"{size_text(node['memory_bytes'])}"
    )


def _link(node: dict[str, Any]) -> str:
    mbit = node["bandwidth_mbit"]
    bandwidth = "bandwidth unknown, taken for unlimited" if mbit is None else f"{mbit:.3g} Mbit/s"
    return (
        f"link: round trip {node['round_trip_ms']:.3g} ms, {bandwidth}; "
        f"a token's bytes take {node['predicted_transfer_ms']:.3g} ms"
    )


def _times(node: dict[str, Any]) -> str:
    expected = "nothing predicted"
    if node["predicted_token_ms"] is not None:
        pace = f"{node['layer_ms']:.3g} ms a layer by {_SOURCES[node['layer_ms_from']]}"
        expected = f"{node['predicted_token_ms']:.3g} ms a token predicted ({pace})"
    if not node["observed_steps"]:
        return f"{expected}, no step in the last minute"
    return (
        f"{expected}, {node['observed_token_ms']:.3g} ms observed: {node['observed_compute_ms']:.3g} ms compute, "
        f"{node['observed_link_ms']:.3g} ms link; {node['observed_queue_ms']:.3g} ms more in its queue"
    )


def _call(method: str, gateway: GatewayAccess, path: str, timeout_s: float) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {gateway.token}"} if gateway.token else {}
    url = gateway.url.rstrip("/") + path
    try:
        response = httpx.request(method, url, headers=headers, timeout=timeout_s, verify=gateway.context or True)
        body = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise click.ClickException(f"{gateway.url} gives no answer of a gateway: {error}") from error
    if response.is_error:
        problem = body.get("error") if isinstance(body, dict) else None
        said = problem.get("message") if isinstance(problem, dict) else None
        if response.status_code == httpx.codes.UNAUTHORIZED:
            said = f"{gateway.url} wants the mesh token or an API key: set MESHNET_MESH_TOKEN, or --mesh-token-file"
        raise click.ClickException(said or f"{gateway.url} answered with HTTP {response.status_code}")
    return dict(body)
