"""Flags and variables of the gateway, and what it refuses to start with."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gateway.__main__ import command, main
from gateway.options import gateway_options, read_settings
from gateway.settings import GatewaySettings, is_loopback, parse_node_url
from shared.options import SettingError
from tests.support.text_tokenizers import build_byte_level

Run = Callable[..., tuple[int, str]]
MINIMAL = ["--model", "m", "--node", "127.0.0.1:9001"]


def parse(args: list[str], env: dict[str, str] | None = None) -> GatewaySettings:
    """What these flags and variables mean."""
    seen: list[GatewaySettings] = []

    @click.command()
    @gateway_options
    def probe(**options: Any) -> None:
        seen.append(read_settings(options))

    result = CliRunner().invoke(probe, args, env=env or {}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_the_least_that_must_be_given_serves_on_loopback():
    """A model and a node."""
    settings = parse(MINIMAL)
    assert settings.nodes == ("ws://127.0.0.1:9001",)
    assert (settings.host, settings.port, settings.api_keys) == ("127.0.0.1", 8000, ())
    assert not settings.access.has_token


def test_variables_hold_several_values():
    """Apart by commas or spaces."""
    env = {
        "MESHNET_MODEL": "m",
        "MESHNET_NODES": "ws://a:1, wss://b/mesh",
        "MESHNET_API_KEYS": "k1,k2",
        "MESHNET_CORS_ALLOW_ORIGIN": "http://a http://b",
        "MESHNET_MAX_BODY_BYTES": "2M",
        "MESHNET_QUEUE_MAX": "3",
    }
    settings = parse([], env)
    assert settings.nodes == ("ws://a:1", "wss://b/mesh")
    assert settings.api_keys == ("k1", "k2")
    assert settings.cors_origins == ("http://a", "http://b")
    assert (settings.body_bytes_max, settings.generation.queue_max) == (2 << 20, 3)


def test_every_flag_has_a_variable_and_help():
    """Anything can be set either way, and is explained."""
    for option in command.params:
        assert isinstance(option, click.Option)
        assert str(option.envvar).startswith("MESHNET_"), option.name
        assert option.show_envvar
        assert option.help


@pytest.mark.parametrize(
    ("args", "missing"),
    [
        ([], "--api-key and --mesh-token"),
        (["--api-key", "k"], "--mesh-token"),
        (["--mesh-token", "t"], "--api-key"),
    ],
)
def test_beyond_this_machine_both_secrets_are_needed(args: list[str], missing: str):
    """Unless that is meant."""
    with pytest.raises(SettingError, match=missing):
        parse([*MINIMAL, "--host", "0.0.0.0", *args])
    assert parse([*MINIMAL, "--host", "0.0.0.0", "--insecure"]).host == "0.0.0.0"
    assert parse([*MINIMAL, "--host", "::", "--api-key", "k", "--mesh-token", "t"]).host == "::"


@pytest.mark.parametrize(("host", "local"), [("localhost", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True)])
def test_loopback_is_recognized(host: str, local: bool):
    """In every spelling."""
    assert is_loopback(host) is local
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("example.com")


@pytest.mark.parametrize(
    "text", ["ftp://a:1", "a", "ws://", "a:b", "", "a:1/x", "ws://a..b:9001", "ws://[::1:9001", "ws://a:99999", "a:0"]
)
def test_what_is_no_node_address_is_refused(text: str):
    """With the form that is wanted."""
    with pytest.raises(ValueError, match="must look like"):
        parse_node_url(text)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`run(*flags)` starts the gateway in this process; its exit code and what it says on standard error."""
    monkeypatch.setattr("gateway.__main__.configure_logging", lambda **_: None)

    def start(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gateway", *flags])
        return main(), capsys.readouterr().err

    return start


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "--model"),
        (["--model", "/nowhere", "--node", "x"], "--node"),
        (["--model", "/nowhere/at/all", "--node", "a:1"], "--model"),
        (["--model", ".", "--node", "a:1", "--port", "99999"], "--port"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(run: Run, args: list[str], complaint: str):
    """Exit code 2, no traceback."""
    code, said = run(*args)
    assert code == 2
    assert said.startswith("error: ")
    assert complaint in said
    assert said.count("\n") == 1


def test_a_taken_port_is_one_line_that_names_it(run: Run, tmp_path: Path):
    """The commonest mistake of all."""
    build_byte_level(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run("--model", str(tmp_path), "--node", "127.0.0.1:1", "--port", str(port))
    assert code == 2
    assert "--port" in said
    assert "in use" in said
