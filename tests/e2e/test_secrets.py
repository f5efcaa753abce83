"""What is secret stays where it belongs: not in a log at its most talkative, not in a frame, not with a node."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.certificates import Authority
from tests.support.fleet import Fleet, free_port, running_fleet, wait_until
from tests.support.link_proxy import LinkProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

API_KEY = "api-key-5b1e"
PROMPT = "zebra-prompt-77"


def stream_answer(client: httpx.Client, url: str) -> str:
    """A streamed answer's text, with the ids and log-probabilities that a curious caller asks for."""
    body = {"model": "default", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
    text = ""
    with client.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True, "logprobs": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["delta"].get("content") or ""
    return text


def logs_of(fleet: Fleet) -> str:
    """Everything that every process has logged."""
    return "\n".join(process.log.read_text(errors="replace") for process in [fleet.gateway, *fleet.nodes])


def test_a_fleet_with_tls_on_every_side_says_nothing_and_changes_its_token(tiny_model: TinyModels, tmp_path: Path):
    """Certificates on every link, tokens from files; at debug level, with a lost node and a refused peer on the way."""
    authority = Authority(tmp_path)
    server, gateway = authority.sign("127.0.0.1"), authority.sign("gateway")
    old, new = "mesh-token-old-9c", "mesh-token-new-9c"
    keys, gateway_tokens = tmp_path / "keys", tmp_path / "gateway-tokens"
    keys.write_text(f"{API_KEY}\n")
    gateway_tokens.write_text(f"{old}\n")
    node_tokens = [tmp_path / f"tokens-{index}" for index in range(2)]
    for file in node_tokens:
        file.write_text(f"{old}\n")
    tls = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--log-level", "debug"]
    dial = ["--mesh-ca", str(authority.cert), "--mesh-cert", str(gateway.cert), "--mesh-key", str(gateway.key)]
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as exits:
        fleet = exits.enter_context(
            running_fleet(
                tiny_model("qwen2"),
                ["0:3", "3:6"],
                tmp_path,
                common_node_args=[
                    *("--dtype", "float32", "--threads", "1"),
                    *tls,
                    "--mesh-client-ca",
                    str(authority.cert),
                ],
                node_args={index: ["--mesh-token-file", str(file)] for index, file in enumerate(node_tokens)},
                gateway_args=[*tls, *dial, "--mesh-token-file", str(gateway_tokens), "--api-key-file", str(keys)],
                node_ports=ports,
                node_urls={index: f"wss://127.0.0.1:{port}" for index, port in enumerate(ports)},
                ca=authority.cert,
            )
        )
        client = exits.enter_context(
            httpx.Client(verify=fleet.tls, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60)
        )
        answer = stream_answer(client, fleet.base_url)
        for file in node_tokens:
            file.write_text(f"{old}\n{new}\n")
        gateway_tokens.write_text(f"{new}\n")
        fleet.nodes[1].kill()
        fleet.nodes[1].start()
        fleet.wait_ready()
        assert stream_answer(client, fleet.base_url) == answer
        for file in node_tokens:
            file.write_text(f"{new}\n")
        gateway_tokens.write_text("wrong-token\n")
        fleet.nodes[0].kill()
        fleet.nodes[0].start()
        wait_until(lambda: "unauthorized" in fleet.nodes[0].log.read_text(), "a refusal of the wrong token", 60)
        gateway_tokens.write_text(f"{new}\n")
        fleet.wait_ready()
        assert stream_answer(client, fleet.base_url) == answer
        logs = logs_of(fleet)
        for secret in (API_KEY, old, new, "wrong-token", PROMPT, answer.strip()):
            assert secret not in logs
        assert '"level":"debug"' in logs


async def test_no_frame_and_no_environment_holds_an_api_key(
    tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What passes from gateway to node, unmasked, and what a node was started with. Nor does a node see any text."""
    monkeypatch.setattr("tests.support.fleet.forked_nodes", None)  # they have another process's variables
    port = free_port()
    async with LinkProxy(port).run() as proxy:
        proxy.heard = {"there": bytearray(), "back": bytearray()}
        fleet_of = running_fleet(
            tiny_model("qwen2"),
            ["0:6"],
            tmp_path,
            common_node_args=["--threads", "1", "--mesh-token", "mesh-token-3f"],
            gateway_args=["--api-key", API_KEY, "--mesh-token", "mesh-token-3f"],
            node_ports=[port],
            node_urls={0: proxy.url},
        )
        fleet = await asyncio.to_thread(fleet_of.__enter__)
        try:
            with httpx.Client(headers={"authorization": f"Bearer {API_KEY}"}, timeout=60) as client:
                assert await asyncio.to_thread(stream_answer, client, fleet.base_url)
            environment = read_environment(fleet.nodes[0].pid)
            said = unmasked(bytes(proxy.heard["there"]))
        finally:
            await asyncio.to_thread(fleet_of.__exit__, None, None, None)
    assert API_KEY.encode() not in environment
    for expected in (b"mesh-token-3f", b'"kind":"hello"', b'"kind":"step"'):
        assert expected in said
    for secret in (API_KEY, PROMPT):
        assert secret.encode() not in said


def read_environment(pid: int) -> bytes:
    """The variables that a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes()


def unmasked(stream: bytes) -> bytes:
    """The payloads of a WebSocket client's frames (RFC 6455, 5.2), one after the other."""
    at = stream.index(b"\r\n\r\n") + 4
    payloads = []
    while at < len(stream):
        length, at = stream[at + 1] & 0x7F, at + 2
        if length >= 126:
            size = 2 if length == 126 else 8
            length, at = int.from_bytes(stream[at : at + size]), at + size
        key, data, at = stream[at : at + 4], stream[at + 4 : at + 4 + length], at + 4 + length
        pad = (key * (len(data) // 4 + 1))[: len(data)]
        payloads.append((int.from_bytes(data) ^ int.from_bytes(pad)).to_bytes(len(data)))
    return b"".join(payloads)
