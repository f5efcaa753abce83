"""Containers without an engine: network namespaces on the networks of a compose file, and processes of nobody in them.

Needs root and iproute2. Each network is a namespace of its own that passes packets between its hosts and to nobody
else; nothing of the machine's own network is touched. Names are resolved by a hosts file that `ip netns exec` mounts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    pair = ["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    works = subprocess.run(pair, check=False, capture_output=True).returncode == 0
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


@dataclass(frozen=True)
class Cable:
    """The far end of a host's cable: an interface in another namespace, which leads to the host's address."""

    namespace: str
    interface: str
    address: str

    def unplug(self) -> None:
        """The host is not told, nor is anybody who talks to it."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def plug_in(self) -> None:
        """What goes to the host goes this way."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")
        _ip("-n", self.namespace, "route", "replace", self.address, "dev", self.interface)


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
        self._cables: dict[str, list[Cable]] = {}

    def start(self) -> None:
        """Make the networks."""
        for network in self._subnets:
            _ip("netns", "add", self.namespace(network))
            _ip("netns", "exec", self.namespace(network), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")

    def add(self, host: str, networks: Sequence[str]) -> None:
        """A namespace on some of the networks."""
        name, number = self._make(host), next(self._numbers)
        for index, network in enumerate(networks):
            switch, subnet = self.namespace(network), self._subnets[network]
            inside, outside, address = f"eth{index}", f"v{number}", f"{subnet}.{number}"
            _ip("-n", name, "link", "add", inside, "type", "veth", "peer", "name", outside, "netns", switch)
            _ip("-n", switch, "addr", "add", f"{subnet}.1/32", "dev", outside)
            self._cables[host].append(Cable(switch, outside, address))
            self._cables[host][-1].plug_in()
            _ip("-n", name, "addr", "add", f"{address}/32", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
            _ip("-n", name, "route", "add", f"{subnet}.1", "dev", inside)
            _ip("-n", name, "route", "add", f"{subnet}.0/24", "via", f"{subnet}.1", "src", address)
            self._addresses[host][network] = address

    def add_hidden(self, host: str, router: str) -> None:
        """A namespace that only reaches its router, which translates its addresses: it can dial, and not be dialled."""
        name, number, way_in = self._make(host), next(self._numbers), self.namespace(router)
        outside, subnet = f"v{number}", f"192.168.{number}"
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", outside, "netns", way_in)
        for namespace, interface, address in ((name, "eth0", f"{subnet}.2"), (way_in, outside, f"{subnet}.1")):
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", namespace, "link", "set", interface, "up")
        _ip("-n", name, "route", "add", "default", "via", f"{subnet}.1")
        _run(self.inside(router, ["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]))
        _run(self.inside(router, ["iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE"]))
        self._cables[host].append(Cable(way_in, outside, f"{subnet}.2"))

    def unplug(self, host: str) -> None:
        """Take its cables out at their other end: what is sent vanishes, and no connection is told."""
        for cable in self._cables[host]:
            cable.unplug()

    def plug_in(self, host: str) -> None:
        """Put its cables back."""
        for cable in self._cables[host]:
            cable.plug_in()

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
        for network in self._subnets:
            _ip("netns", "del", self.namespace(network))
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
