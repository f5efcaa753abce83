"""The node's settings: what each flag reads, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shard.machine import machine_memory, physical_cores
from shard.options import default_node_id, node_options, read_settings
from shard.settings import (
    NODE_ID_CHARS_MAX,
    Address,
    KvLimits,
    NodeSettings,
    check_layers,
    parse_join_url,
    parse_node_id,
)
from shared.layers import LayerRange
from shared.mesh_access import MeshAccess
from shared.mesh_tokens import MeshTokens
from shared.options import SettingError
from tests.support.node_settings import LISTENING


@pytest.mark.parametrize(
    ("text", "address", "is_loopback"),
    [
        ("127.0.0.1:9001", Address("127.0.0.1", 9001), True),
        ("localhost:0", Address("localhost", 0), True),
        ("[::1]:9001", Address("::1", 9001), True),
        ("0.0.0.0:65535", Address("0.0.0.0", 65535), False),
        ("[::]:1", Address("::", 1), False),
        ("node.example:80", Address("node.example", 80), False),
    ],
)
def test_address_is_read_and_written(text: str, address: Address, is_loopback: bool) -> None:
    """Hosts, IPv4 and bracketed IPv6; only this machine's own addresses are loopback."""
    assert Address.parse(text) == address
    assert str(address) == text
    assert address.is_loopback is is_loopback


@pytest.mark.parametrize("text", ["", "9001", ":9001", "host", "host:", "host:x", "host:65536", "::1:9001", "[host]:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """Each says what an address looks like."""
    with pytest.raises(ValueError, match=r"must (look like|be from 0)"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["", "x" * (NODE_ID_CHARS_MAX + 1), "a\nb"])
def test_node_id_must_fit_a_message(text: str) -> None:
    """Ids are bounded and printable; the default one is."""
    with pytest.raises(ValueError, match="printable characters"):
        parse_node_id(text)
    assert parse_node_id(default_node_id(LayerRange(100, 128)))


def settings(listen: str, token: str | None = None, *, insecure: bool = False) -> NodeSettings:
    """Settings that differ in who may reach the node."""
    access = MeshAccess(tokens=MeshTokens([token] if token else []))
    return replace(LISTENING, listen=Address.parse(listen), access=access, insecure=insecure)


def test_listening_beyond_loopback_needs_a_token_or_a_word() -> None:
    """The default is secure; a token or `--insecure` opens it."""
    with pytest.raises(SettingError, match="--listen"):
        settings("0.0.0.0:9001").check()
    settings("0.0.0.0:9001", "secret").check()
    settings("0.0.0.0:9001", insecure=True).check()
    settings("127.0.0.1:9001").check()


def test_layers_must_be_the_models() -> None:
    """A range past the model's end names the flag and the number of layers."""
    check_layers(LayerRange(2, 4), 4)
    with pytest.raises(SettingError, match="--layers: 2:5 ends after the model's last layer: it has 4"):
        check_layers(LayerRange(2, 5), 4)


def read(*arguments: str, env: dict[str, str] | None = None) -> NodeSettings:
    """Settings from flags and variables."""
    found: list[NodeSettings] = []

    @click.command()
    @node_options
    def command(**options: object) -> None:
        found.append(read_settings(options))

    result = CliRunner().invoke(command, arguments, env=env)
    if isinstance(result.exception, SettingError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found[0]


FIXED = ("--model", "m", "--layers", "0:2")


def test_defaults() -> None:
    """What a node does unless told otherwise."""
    given = read(*FIXED)
    assert given.listen == Address("127.0.0.1", 9001)
    assert given.kv == KvLimits(enabled=True, ttl_s=600.0, sessions_max=8, bytes_max=None)
    assert given.threads == physical_cores()
    assert not given.access.has_token


def test_flags_win_over_variables() -> None:
    """Every setting has both; the flag is nearer to the user. An empty token is none."""
    env = {"MESHNET_KV_MAX_SESSIONS": "3", "MESHNET_KV_TTL_SECONDS": "9", "MESHNET_KV_CACHE": "0"}
    given = read(*FIXED, "--kv-max-sessions", "5", "--mesh-token", "", env=env)
    assert given.kv == KvLimits(enabled=False, ttl_s=9.0, sessions_max=5, bytes_max=None)
    assert not given.access.has_token


def test_joining_needs_nothing_else() -> None:
    """No model, no layers, no open port; the id is the machine's own."""
    given = read("--join", "ws://a:8000", "--join", "wss://b/x/mesh", "--join", "ws://a:8000/")
    assert given.joins == ("ws://a:8000/mesh", "wss://b/x/mesh")
    assert (given.model, given.layers, given.listen, given.node_id) == (None, None, None, None)
    assert read(env={"MESHNET_JOIN": "ws://a/mesh,ws://b/mesh"}).joins == ("ws://a/mesh", "ws://b/mesh")


def test_joining_goes_with_fixed_layers_and_with_listening() -> None:
    """The range is then the node's own, and whoever wants may dial it too."""
    given = read(*FIXED, "--join", "ws://a/mesh", "--listen", "127.0.0.1:0")
    assert (given.layers, given.listen) == (LayerRange(0, 2), Address("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "m"], "--layers: give the range, or --join"),
        (["--layers", "0:2"], "--model: is missing: of which model"),
        ([*FIXED, "--memory", "4G"], "--memory: is for a node that is given its layers"),
        (["--join", "ws://a/mesh", "--listen", "0.0.0.0:9001"], "--listen: 0.0.0.0:9001 is beyond"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments: list[str], says: str) -> None:
    """Each names the flag that is missing or too much."""
    with pytest.raises(SettingError) as refused:
        read(*arguments)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "text",
    ["", "a:8000", "http://a/mesh", "ws://", "ws:///mesh", "ws://a/mesh?x=1", "ws://u:p@a/mesh", "ws://a:99999/"],
)
def test_what_is_no_gateways_address_is_refused(text: str) -> None:
    """Each says what one looks like, or what is wrong with the port."""
    with pytest.raises(ValueError, match=r"must (look like|be from 0)"):
        parse_join_url(text)


def test_every_option_has_its_variable() -> None:
    """`--kv-max-bytes` is `MESHNET_KV_MAX_BYTES`, and so on for each."""

    @click.command()
    @node_options
    def command(**_: object) -> None:
        pass

    for parameter in command.params:
        assert parameter.name is not None
        assert parameter.envvar == f"MESHNET_{parameter.name.upper()}"
        assert isinstance(parameter, click.Option)
        assert parameter.help


def cgroup(folder: Path, limit: str, taken: int, cached: int = 0) -> None:
    """A control group's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon {taken - cached}\nactive_file 0\ninactive_file {cached}\n")


def test_memory_is_the_machines_without_a_limit(tmp_path: Path) -> None:
    """A control group without one, or none at all, changes nothing."""
    machine = machine_memory(tmp_path, tmp_path / "absent")
    assert 0 < machine.used_bytes < machine.limit_bytes
    cgroup(tmp_path, "max", 500)
    assert machine_memory(tmp_path, tmp_path / "absent").limit_bytes == machine.limit_bytes
    assert machine.free_bytes > 1000


def test_memory_honours_the_containers_limit(tmp_path: Path) -> None:
    """Only what the limit leaves is free, cached files count as free, and nothing is below 0."""
    own = tmp_path / "own"
    own.write_text("0::/\n")
    cgroup(tmp_path, "1500", 500)
    memory = machine_memory(tmp_path, own)
    assert (memory.free_bytes, memory.limit_bytes) == (1000, 1500)
    cgroup(tmp_path, "1500", 1400, cached=1000)
    assert machine_memory(tmp_path, own).free_bytes == 1100
    cgroup(tmp_path, "400", 500)
    assert machine_memory(tmp_path, own).free_bytes == 0


def test_memory_honours_the_limits_of_groups_around_its_own(tmp_path: Path) -> None:
    """As systemd sets them: the tightest counts, wherever it stands."""
    own = tmp_path / "own"
    own.write_text("0::/user.slice/node.scope\n")
    cgroup(tmp_path / "user.slice" / "node.scope", "9000", 100)
    cgroup(tmp_path / "user.slice", "2000", 1500)
    memory = machine_memory(tmp_path, own)
    assert (memory.free_bytes, memory.limit_bytes) == (500, 2000)
