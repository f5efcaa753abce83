"""``POST /mesh/nodes/{node}/drain`` and the command that asks for it, against a scripted drainer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest

from gateway.fleet.drain import Drained, DrainRefused
from shared.cli.operate import GatewayAccess, run_drain, run_live_plan
from shared.mesh_tokens import MeshTokens
from tests.support.api_server import ApiServer, running_api
from tests.support.text_tokenizers import build_byte_level

SECRET = "the-token"


class ScriptedDrainer:
    """Drains one node, and refuses others."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.given_up = threading.Event()

    async def drain(self, node: str) -> Drained:
        """Answer at once."""
        self.asked.append(node)
        match node:
            case "a b":
                return Drained(node=node, sessions_left=0, is_gone=True, took_s=1.25)
            case "slow":
                return Drained(node=node, sessions_left=2, is_gone=False, took_s=180.0)
            case "endless":
                try:
                    await asyncio.sleep(60)
                finally:
                    self.given_up.set()
                raise AssertionError
            case "needed":
                raise DrainRefused("no_replacement", "nothing took the place of needed")
            case "leaving":
                raise DrainRefused("already_draining", "leaving is being drained already")
            case _:
                raise DrainRefused("unknown_node", f"no node called {node} is connected")


@pytest.fixture(scope="module")
def drainer() -> ScriptedDrainer:
    """The gateway's."""
    return ScriptedDrainer()


@pytest.fixture(scope="module")
def api(drainer: ScriptedDrainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A gateway that asks for the mesh token."""
    model = build_byte_level(tmp_path_factory.mktemp("model"))
    with running_api(model, mesh_tokens=MeshTokens([SECRET]), drainer=drainer) as api:
        yield api


def test_a_caller_who_leaves_takes_the_wish_back(api: ApiServer, drainer: ScriptedDrainer) -> None:
    """Ctrl-C of the command: the node stays in service."""
    headers = {"authorization": f"Bearer {SECRET}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{api.url}/mesh/nodes/endless/drain", headers=headers, timeout=0.5)
    assert drainer.given_up.wait(5)


@pytest.mark.parametrize(
    ("node", "status", "code"),
    [("needed", 409, "no_replacement"), ("leaving", 409, "already_draining"), ("x", 404, "unknown_node")],
)
def test_a_refusal_has_the_shape_of_every_error(api: ApiServer, node: str, status: int, code: str) -> None:
    """With a code that programs can tell apart."""
    headers = {"authorization": f"Bearer {SECRET}"}
    response = api.http.post(f"/mesh/nodes/{node}/drain", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_who_has_no_token_drains_nobody(api: ApiServer) -> None:
    """And a GET drains nobody either."""
    assert api.http.post("/mesh/nodes/x/drain").status_code == 401
    headers = {"authorization": f"Bearer {SECRET}"}
    assert api.http.get("/mesh/nodes/x/drain", headers=headers).status_code == 405


def test_the_command_says_what_came_of_it(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are quoted on their way; what is left over is said."""
    run_drain("a b", GatewayAccess(api.url, SECRET))
    assert "drained a b in 1.2 s: all its sessions have moved; it has ended" in capsys.readouterr().out
    run_drain("slow", GatewayAccess(api.url + "/", SECRET))
    assert (
        "2 of its sessions had not moved and are rebuilt; it was told to end and has not yet" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("node", "token", "reason"),
    [("needed", SECRET, "nothing took the place"), ("a b", None, "API key"), ("a b", "wrong", "API key")],
)
def test_the_command_fails_with_the_gateways_reason(api: ApiServer, node: str, token: str | None, reason: str) -> None:
    """In one sentence."""
    with pytest.raises(click.ClickException, match=reason):
        run_drain(node, GatewayAccess(api.url, token))


def test_a_gateway_that_is_none(api: ApiServer) -> None:
    """Nothing there, something else there, and a gateway without a fleet."""
    for address in ("http://127.0.0.1:1", "nowhere"):
        with pytest.raises(click.ClickException, match="gives no answer of a gateway"):
            run_drain("a", GatewayAccess(address, None))
    with pytest.raises(click.ClickException, match="makes no plans"):
        run_live_plan(GatewayAccess(api.url, SECRET), as_json=False)


def test_a_gateway_without_a_fleet_drains_nobody(tmp_path: Path) -> None:
    """It says so."""
    with running_api(build_byte_level(tmp_path)) as api:
        assert api.http.post("/mesh/nodes/a/drain").status_code == 404
