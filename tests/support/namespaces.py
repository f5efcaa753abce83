"""Containers without an engine: network namespaces on the networks of a compose file, and processes of nobody in them.

Needs root and iproute2. A bridge for each network is in a namespace of its own, so nothing of the machine's network is
touched; names are resolved by a hosts file that `ip netns exec` mounts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

UID = 10001
"""As in the images."""


def available() -> bool:
    """Whether namespaces can be made here."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("setpriv"):
        return False
    name = f"mn{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        return False
    bridge = ["ip", "-n", name, "link", "add", "br", "type", "bridge"]
    works = subprocess.run(bridge, check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=True)
    return works


def translates_addresses() -> bool:
    """Whether a namespace here can be a router; needs `available`, and iptables."""
    if not shutil.which("iptables"):
        return False
    try:
        with lab(["probe"]) as probe:
            probe.add("router", ["probe"])
            probe.add_hidden("hidden", "router")
    except subprocess.CalledProcessError:
        return False
    return True


class Lab:
    """Networks and the namespaces on them. Made by `lab`.

    Args:
        networks: Their names.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        self._prefix = f"mn{os.getpid()}"
        self._subnets = {network: f"10.213.{number}" for number, network in enumerate(networks, 1)}
        self._numbers = itertools.count(2)
        self._addresses: dict[str, dict[str, str]] = {}
        self._switch = f"{self._prefix}-switch"
        self._cables: dict[str, list[tuple[str, str]]] = {}

    def start(self) -> None:
        """Make a bridge for each network."""
        _ip("netns", "add", self._switch)
        for number in range(1, len(self._subnets) + 1):
            _ip("-n", self._switch, "link", "add", f"br{number}", "type", "bridge")
            _ip("-n", self._switch, "link", "set", f"br{number}", "up")

    def add(self, host: str, networks: Sequence[str]) -> None:
        """A namespace on some of the networks."""
        name, number = self._make(host), next(self._numbers)
        for index, network in enumerate(networks):
            bridge = f"br{list(self._subnets).index(network) + 1}"
            inside, outside = f"eth{index}", f"v{number}x{index}"
            _ip("-n", name, "link", "add", inside, "type", "veth", "peer", "name", outside, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", outside, "master", bridge, "up")
            address = f"{self._subnets[network]}.{number}"
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
            self._addresses[host][network] = address
            self._cables[host].append((self._switch, outside))

    def add_hidden(self, host: str, router: str) -> None:
        """A namespace that only reaches its router, which translates its addresses: it can dial, and not be dialled."""
        name, number, way_in = self._make(host), next(self._numbers), self.namespace(router)
        outside, subnet = f"v{number}x0", f"192.168.{number}"
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", outside, "netns", way_in)
        for namespace, interface, address in ((name, "eth0", f"{subnet}.2"), (way_in, outside, f"{subnet}.1")):
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", namespace, "link", "set", interface, "up")
        _ip("-n", name, "route", "add", "default", "via", f"{subnet}.1")
        _run(self.inside(router, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]))
        _run(self.inside(router, ["iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE"]))
        self._cables[host].append((way_in, outside))

    def unplug(self, host: str) -> None:
        """Take its cables out at their other end: what is sent vanishes, and no connection is told."""
        for namespace, interface in self._cables[host]:
            _ip("-n", namespace, "link", "set", interface, "down")

    def plug_in(self, host: str) -> None:
        """Put its cables back."""
        for namespace, interface in self._cables[host]:
            _ip("-n", namespace, "link", "set", interface, "up")

    def inside(self, host: str, command: Sequence[str]) -> list[str]:
        """What runs a command there as whoever we are."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def _make(self, host: str) -> str:
        name = self.namespace(host)
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        self._addresses[host], self._cables[host] = {}, []
        return name

    def write_hosts(self) -> None:
        """Let every host know those that it shares a network with, as an engine's resolver does."""
        for host, own in self._addresses.items():
            lines = ["127.0.0.1 localhost"]
            for other, theirs in self._addresses.items():
                shared = [network for network in own if network in theirs]
                lines += [f"{theirs[shared[0]]} {other}"] if shared else []
            folder = Path("/etc/netns") / self.namespace(host)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join([*lines, ""]))

    def address(self, host: str, network: str) -> str:
        """Where a host is reached."""
        return self._addresses[host][network]

    def command(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """What runs a command there, as nobody and with this environment alone.

        Whatever is on this machine may be read: an image's files are its user's, this interpreter's may be root's.
        """
        nobody = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"]
        nobody += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
        variables = [f"{name}={value}" for name, value in env.items()]
        return ["ip", "netns", "exec", self.namespace(host), *nobody, "env", "-i", *variables, *command]

    def stop(self) -> None:
        """Remove every trace; processes have ended."""
        for host in self._addresses:
            _ip("netns", "del", self.namespace(host))
            shutil.rmtree(Path("/etc/netns") / self.namespace(host), ignore_errors=True)
        _ip("netns", "del", self._switch)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # unless others use it

    def namespace(self, host: str) -> str:
        """As `ip netns` knows it."""
        return f"{self._prefix}-{host}"


@contextlib.contextmanager
def lab(networks: Sequence[str]) -> Iterator[Lab]:
    """Networks, for as long as the block runs."""
    made = Lab(networks)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
