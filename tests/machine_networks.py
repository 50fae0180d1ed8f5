"""Networks for the machines of the cloud in a folder: each has a network namespace, which can be cut off silently."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from makeway_quota.autoscale.provider import CallOutcomeUnknown
from makeway_quota.autoscale.providers.local import LocalProvider

TABLE = "partition"
SUBNETS = 2**15
"""Of four addresses each, in the network that is reserved for tests of networks, 198.18.0.0/15"""


class MachineNetwork:
    """One machine's network: a cable to this host, over which nothing passes while it is cut."""

    def __init__(self, number: int) -> None:
        self.name = f"mwnet{number}"
        first = (198 << 24) + (18 << 16) + 4 * number
        self.host, self.machine = (
            ".".join(str(first + offset >> shift & 255) for shift in (24, 16, 8, 0)) for offset in (1, 2)
        )
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "address", "add", f"{self.host}/30", "dev", self.name)
        _run("ip", "link", "set", self.name, "up")
        _run("ip", "-n", self.name, "link", "set", "lo", "up")
        _run("ip", "-n", self.name, "address", "add", f"{self.machine}/30", "dev", "eth0")
        _run("ip", "-n", self.name, "link", "set", "eth0", "up")
        _run("ip", "-n", self.name, "route", "add", "default", "via", self.host)

    def cut(self) -> None:
        """Drop every packet, both ways; connections stay open."""
        lines = [f"add table inet {TABLE}"]
        for chain, hook, device in (("sent", "output", "oifname"), ("received", "input", "iifname")):
            lines.append(f"add chain inet {TABLE} {chain} {{ type filter hook {hook} priority 0; }}")
            lines.append(f"add rule inet {TABLE} {chain} {device} lo accept")
            lines.append(f"add rule inet {TABLE} {chain} drop")
        self._nft("\n".join(lines))

    def mend(self) -> None:
        """Drop nothing any more."""
        self._nft(f"add table inet {TABLE}\ndelete table inet {TABLE}")

    def remove(self) -> None:
        """Remove the network."""
        _run("ip", "netns", "delete", self.name)

    def _nft(self, rules: str) -> None:
        _run("ip", "netns", "exec", self.name, "nft", "-f", "-", said=rules)


class NetworkedCloud(LocalProvider):
    """The cloud in a folder whose machines have networks of their own; it does not answer for some of them."""

    def __init__(self, folder: Path, networks: Sequence[MachineNetwork]) -> None:
        super().__init__(folder)
        self._free = list(networks)
        self.networks: dict[str, MachineNetwork] = {}
        """by instance"""
        self.unanswered: set[str] = set()
        """instances that it does not end: such a call has no answer"""

    def within(self, instance: str) -> Sequence[str]:
        """Return the command that starts a machine in a network of its own."""
        network = self.networks.setdefault(instance, self._free[0])
        if self._free and network is self._free[0]:
            del self._free[0]
        return ("ip", "netns", "exec", network.name)

    def terminate(self, instance: str) -> bool:
        """End a machine, unless the call has no answer."""
        if instance in self.unanswered:
            raise CallOutcomeUnknown("no answer")
        return super().terminate(instance)


@contextmanager
def machine_networks(count: int) -> Iterator[list[MachineNetwork]]:
    """Make networks for so many machines; skip the test where this account may make none."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "nft"))):
        pytest.skip("network namespaces need root, ip and nft")
    first, made = os.getpid() * count % SUBNETS, []
    try:
        for number in range(count):
            made.append(MachineNetwork((first + number) % SUBNETS))
        yield made
    finally:
        for network in made:
            with suppress(subprocess.CalledProcessError):
                network.remove()


def _run(*command: str, said: str = "") -> None:
    subprocess.run(command, input=said, text=True, check=True, capture_output=True)
