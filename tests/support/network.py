"""Hosts of a network of their own, as network namespaces: addresses, a switch, a router that translates addresses.

Nothing of the machine's own network is touched: hosts are linked by a bridge that lies in a namespace too. Needs root,
`ip`, and for a router `iptables`; `why_impossible` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SUBNET = "10.77.0"
HIDDEN_SUBNET = "192.168.77"
"""Behind the router; nobody outside has a route to it."""


class NetworkError(Exception):
    """A command that sets the network up has failed; says which, and what it said."""


@dataclass(frozen=True)
class Host:
    """One namespace with one address.

    Args:
        name: For people.
        namespace: As `ip netns` knows it.
        address: Of its interface ``eth0``.
        cable: The namespace and the interface at the other end of its cable.
    """

    name: str
    namespace: str
    address: str
    cable: tuple[str, str]

    def command(self, command: Sequence[str]) -> list[str]:
        """The command as it is run on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """Run a command there to its end, and return what it printed.

        Raises:
            NetworkError: It failed.
        """
        return _run(*self.command(command), timeout_s=timeout_s)

    def unplug(self) -> None:
        """Take the cable out at its other end: what is sent vanishes, and no connection is told."""
        self._set_cable("down")

    def plug_in(self) -> None:
        """Put the cable back."""
        self._set_cable("up")

    def _set_cable(self, state: str) -> None:
        namespace, interface = self.cable
        _run("ip", "-n", namespace, "link", "set", interface, state)


@dataclass
class Network:
    """Hosts on one switch. Made by `network`."""

    prefix: str
    hosts: dict[str, Host] = field(default_factory=dict)

    def add(self, name: str) -> Host:
        """One more host on the switch."""
        switch = f"{self.prefix}-switch"
        host = self._make(name, SUBNET, (switch, f"p{len(self.hosts)}"))
        _run("ip", "-n", switch, "link", "set", host.cable[1], "master", "br0", "up")
        return host

    def add_hidden(self, name: str, router: Host) -> Host:
        """One more host that only `router` reaches: it can dial out, translated, and nobody can dial it.

        Raises:
            NetworkError: The kernel or `iptables` cannot translate addresses.
        """
        host = self._make(name, HIDDEN_SUBNET, (router.namespace, f"in-{len(self.hosts)}"))
        inside = host.cable[1]
        _run("ip", "-n", router.namespace, "addr", "add", f"{HIDDEN_SUBNET}.254/24", "dev", inside)
        _run("ip", "-n", router.namespace, "link", "set", inside, "up")
        router.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        router.run("iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
        return host

    def _make(self, name: str, subnet: str, cable: tuple[str, str]) -> Host:
        host = Host(name, f"{self.prefix}-{name}", f"{subnet}.{len(self.hosts) + 1}", cable)
        _run("ip", "netns", "add", host.namespace)
        self.hosts[name] = host
        peer = ("peer", cable[1], "netns", cable[0])
        _run("ip", "-n", host.namespace, "link", "add", "eth0", "type", "veth", *peer)
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", host.namespace, "link", "set", interface, "up")
        _run("ip", "-n", host.namespace, "route", "add", "default", "via", f"{subnet}.254")
        return host


def why_impossible(*, hidden_hosts: bool = False) -> str | None:
    """What this machine lacks for a network of namespaces; None when it lacks nothing."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", *(["iptables"] if hidden_hosts else [])) if shutil.which(tool) is None]
    if absent:
        return f"needs {' and '.join(absent)}"
    try:
        with network("mnprobe") as probe:
            router = probe.add("router")
            if hidden_hosts:
                probe.add_hidden("hidden", router)
    except NetworkError as error:
        return str(error)
    return None


@contextlib.contextmanager
def network(prefix: str) -> Iterator[Network]:
    """A switch without hosts; everything is gone at the end.

    Args:
        prefix: Begins the names of all namespaces; two networks at once need two.
    """
    made = Network(prefix)
    switch = f"{prefix}-switch"
    _run("ip", "netns", "add", switch)
    try:
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        yield made
    finally:
        for namespace in [*(host.namespace for host in made.hosts.values()), switch]:
            with contextlib.suppress(NetworkError):
                _run("ip", "netns", "del", namespace)


def _run(*command: str, timeout_s: float = 30.0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
