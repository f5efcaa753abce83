"""TLS and client certificates over real sockets: what is trusted, what is refused, and what stays open to probes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from litestar import Litestar

from gateway.joins import Joins
from gateway.link_listener import LinkListener
from gateway.mesh import Mesh
from gateway.server import create_server, listen
from shared.clock import SystemClock
from shared.errors import HandshakeRefused, LinkClosed, MeshError
from shared.handshake import VERSIONS
from shared.layers import LayerRange
from shared.mesh_access import MeshAccess
from shared.mesh_tokens import MeshTokens
from shared.messages import Hello, NodeInfo
from shared.tls import create_dial_context, create_listen_context
from tests.conftest import TinyModels
from tests.support.api_server import running_api
from tests.support.certificates import Authority, Identity
from tests.support.fake_node import running_fake_node

NODE = NodeInfo(node="n", model="m", layers=LayerRange(0, 2), num_layers=2)
HELLO = Hello(versions=VERSIONS, role="gateway", peer="g")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files are."""
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    """The mesh's own."""
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    """Nobody here trusts it."""
    return Authority(folder, "stranger")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Identity:
    """Of whoever listens on loopback."""
    return authority.sign("127.0.0.1")


def listening(server: Identity, client_ca: Path | None = None) -> MeshAccess:
    """The access of a node that listens with TLS, and asks for certificates if told of whom."""
    return MeshAccess(
        tokens=MeshTokens(["new", "old"]),
        listen_context=create_listen_context(server.cert, server.key, client_ca),
        needs_certificate=client_ca is not None,
    )


def dialling(ca: Path | None, identity: Identity | None = None, token: str = "old") -> MeshAccess:
    """The access of a gateway that dials."""
    cert, key = (identity.cert, identity.key) if identity else (None, None)
    return MeshAccess(tokens=MeshTokens([token]), dial_context=create_dial_context(ca, cert, key))


def secure(url: str) -> str:
    """The same address with TLS."""
    return url.replace("ws://", "wss://")


async def test_a_link_is_opened_over_tls(authority: Authority, server: Identity):
    """To a node whose certificate the mesh's authority has signed, with any of its tokens."""
    async with running_fake_node(access=listening(server)) as node:
        for token in ("new", "old"):
            link = await dialling(authority.cert, token=token).dial(secure(node.url), HELLO)
            assert link.peer == "node-0-4"
            await link.close()
        with pytest.raises(HandshakeRefused, match="the mesh token is missing or wrong"):
            await dialling(authority.cert, token="older").dial(secure(node.url), HELLO)


async def test_a_node_that_is_not_trusted_is_not_told_the_token(
    authority: Authority, stranger: Authority, server: Identity
):
    """Its authority is unknown, or its certificate is for another host: the link ends before a frame is sent."""
    async with running_fake_node(access=listening(server)) as node:
        for access in (dialling(None), dialling(stranger.cert)):
            with pytest.raises(LinkClosed, match="is not trusted: unable to get local issuer certificate") as caught:
                await access.dial(secure(node.url), HELLO)
            assert caught.value.code == "bad_certificate"
    async with running_fake_node(access=listening(authority.sign("elsewhere"))) as node:
        with pytest.raises(LinkClosed, match=r"is not trusted: .*127\.0\.0\.1"):
            await dialling(authority.cert).dial(secure(node.url), HELLO)


async def test_plain_and_tls_do_not_meet(authority: Authority, server: Identity):
    """Either way round it is an error in words, within the handshake's time."""
    async with running_fake_node(access=listening(server)) as node:
        with pytest.raises(MeshError, match="cannot be reached"):
            await dialling(authority.cert).dial(node.url, HELLO)
    async with running_fake_node() as node:
        with pytest.raises(MeshError, match="cannot be reached"):
            await dialling(authority.cert).dial(secure(node.url), HELLO)


async def test_a_certificate_is_demanded_of_links_alone(authority: Authority, stranger: Authority, server: Identity):
    """Without one a link is refused in words, a stranger's does not even get there, and a probe needs none."""
    gateway = authority.sign("gateway")
    async with running_fake_node(access=listening(server, authority.cert)) as node:
        link = await dialling(authority.cert, gateway).dial(secure(node.url), HELLO)
        await link.close()
        with pytest.raises(HandshakeRefused, match="need a client certificate: --mesh-cert and --mesh-key") as caught:
            await dialling(authority.cert).dial(secure(node.url), HELLO)
        assert caught.value.code == "certificate_required"
        with pytest.raises(LinkClosed):
            await dialling(authority.cert, stranger.sign("gateway")).dial(secure(node.url), HELLO)
        async with httpx.AsyncClient(verify=create_dial_context(authority.cert, None, None)) as client:
            probe = await client.get(secure(node.url).replace("wss://", "https://") + "/readyz")
        assert probe.json()["state"] == "ready"


async def test_nodes_that_join_over_tls_show_a_certificate(authority: Authority, stranger: Authority, server: Identity):
    """On the API's port: without one, or with a stranger's, no link comes of it; with one and the token it does."""
    access = listening(server, authority.cert)
    hello = Hello(versions=VERSIONS, role="node", peer="n", node=NODE)
    mesh, clock = Mesh(), SystemClock()
    joins = Joins(mesh, gateway_id="g", model="m", access=access, clock=clock)
    links, socket = LinkListener(joins, clock=clock), listen("127.0.0.1", 0)
    app = Litestar([], openapi_config=None)
    gateway = create_server(app, drain_s=1, links=links, context=access.listen_context)
    serving = asyncio.create_task(gateway.serve(sockets=[socket]))
    url = f"wss://127.0.0.1:{socket.getsockname()[1]}/mesh"
    try:
        link = await dialling(authority.cert, authority.sign("n")).dial(url, hello)
        assert link.peer == "g"
        await link.close()
        with pytest.raises(HandshakeRefused) as caught:
            await dialling(authority.cert).dial(url, hello)
        assert caught.value.code == "certificate_required"
        with pytest.raises(LinkClosed):
            await dialling(authority.cert, stranger.sign("n")).dial(url, hello)
        with pytest.raises(HandshakeRefused, match="the mesh token is missing or wrong"):
            await dialling(authority.cert, authority.sign("n"), token="older").dial(url, hello)
    finally:
        await links.close()
        gateway.should_exit = True
        await serving


@pytest.fixture(scope="module")
def api_url(tiny_model: TinyModels, authority: Authority, server: Identity) -> Iterator[str]:
    """A gateway's HTTP side with TLS, which also asks for certificates, as nodes that join would show."""
    context = create_listen_context(server.cert, server.key, authority.cert)
    with running_api(tiny_model("qwen2"), context=context, api_keys=("key",)) as api:
        api.generator.script = lambda _: [*api.tokenizer.encode_text("fine"), min(api.tokenizer.eos_ids)]
        yield f"https://127.0.0.1:{api.port}"


def test_an_api_client_needs_no_certificate(api_url: str, authority: Authority):
    """Only the authority; a stream comes whole, and a refusal reaches its reader."""
    headers = {"authorization": "Bearer key"}
    with httpx.Client(verify=create_dial_context(authority.cert, None, None), base_url=api_url) as client:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={**headers, "x-long": "x" * 100_000}).status_code == 431


def test_an_unknown_authority_is_the_clients_to_refuse(api_url: str):
    """And plain HTTP gets no answer on a TLS port."""
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{api_url}/healthz", verify=ssl.create_default_context())
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{api_url.replace('https', 'http')}/healthz")
