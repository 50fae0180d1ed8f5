"""The network of one cluster on this machine: a bridge, its addresses, and a network namespace for each real node.

Every interface and namespace has the bridge's name as its prefix, so that `remove` finds them all. No node has a
default route: no packet of a pod leaves the machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from pathlib import Path

from .commands import run, succeeds
from .folder import Folder, folders, locked_registry
from .problems import KubeProblem

MAX_CLUSTERS = 32
NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, slots=True)
class Network:
    """The addresses of one cluster: nodes in 10.77.N.0/24, pods in 10.(128 + N).0.0/16."""

    number: int

    @property
    def bridge(self) -> str:
        """Return the name of the bridge."""
        return f"mwkube{self.number}"

    @property
    def host(self) -> str:
        """Return the address of this machine on the bridge."""
        return f"10.77.{self.number}.1"

    @property
    def nodes(self) -> IPv4Network:
        """Return the network of the nodes."""
        return IPv4Network(f"10.77.{self.number}.0/24")

    @property
    def pods(self) -> IPv4Network:
        """Return the network of all pods."""
        return IPv4Network(f"10.{128 + self.number}.0.0/16")

    def address(self, node: int) -> str:
        """Return the address of a node, by its number."""
        return f"10.77.{self.number}.{node + 2}"

    def pods_of(self, node: int) -> IPv4Network:
        """Return the network of a node's pods."""
        return IPv4Network(f"10.{128 + self.number}.{node}.0/24")

    def namespace(self, node: int) -> str:
        """Return the name of a node's network namespace."""
        return f"{self.bridge}-{node}"

    def port(self, node: int) -> str:
        """Return the name of a node's port of the bridge: the host's end of its veth pair."""
        return f"{self.bridge}p{node}"


def create(folder: Folder) -> Network:
    """Make the bridge of a cluster, with addresses that no other route of this machine has."""
    with locked_registry():
        used = _routes()
        for number in range(MAX_CLUSTERS):
            network = Network(number)
            taken = any(network.nodes.overlaps(route) or network.pods.overlaps(route) for route in used)
            if taken or (Path("/sys/class/net") / network.bridge).exists():
                continue
            for other in folders():  # a cluster that was killed before it made this bridge, or after it removed it
                if other.facts().get("network") == number:
                    other.record(network=None)
            folder.record(network=number)
            if succeeds(["ip", "link", "add", network.bridge, "type", "bridge"]):
                run(["ip", "address", "add", f"{network.host}/24", "dev", network.bridge])
                run(["ip", "link", "set", network.bridge, "up"])
                return network
            folder.record(network=None)  # a cluster of another registry was faster
    raise KubeProblem(
        "This machine has no free addresses for a cluster: 10.77.0.0 to 10.77.31.255 or 10.128.0.0 to 10.159.255.255 "
        "are all routed elsewhere. `python -m kube_cluster list` shows the clusters that run."
    )


def add_node(network: Network, node: int, others: list[int]) -> None:
    """Make the network namespace of a node: a veth pair to the bridge, and routes to the pods of the other nodes."""
    namespace, port = network.namespace(node), network.port(node)
    run(["ip", "netns", "add", namespace])
    run(["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace])
    run(["ip", "link", "set", port, "master", network.bridge, "up"])
    run(["ip", "-n", namespace, "link", "set", "lo", "up"])
    run(["ip", "-n", namespace, "address", "add", f"{network.address(node)}/24", "dev", "eth0"])
    run(["ip", "-n", namespace, "link", "set", "eth0", "up"])
    run(["ip", "route", "replace", str(network.pods_of(node)), "via", network.address(node), "dev", network.bridge])
    for other in others:
        for here, there in ((node, other), (other, node)):
            route = [str(network.pods_of(there)), "via", network.address(there)]
            run(["ip", "-n", network.namespace(here), "route", "replace", *route])


def release(folder: Folder) -> None:
    """Remove the network of a cluster, if it has one; another cluster may have its number from then on."""
    with locked_registry():
        if (number := folder.facts().get("network")) is not None:
            remove(Network(number))
            folder.record(network=None)


def remove(network: Network) -> None:
    """Remove everything that belongs to a cluster's network; nothing to do when it is gone."""
    for namespace in NAMESPACES.glob(f"{network.bridge}-*"):
        run(["ip", "netns", "delete", namespace.name])
    for link in Path("/sys/class/net").glob(f"{network.bridge}p*"):
        succeeds(["ip", "link", "delete", link.name])  # it may vanish with its namespace just now
    if succeeds(["ip", "link", "show", network.bridge]):
        run(["ip", "link", "delete", network.bridge])


def _routes() -> list[IPv4Network]:
    """Return the networks that this machine has routes to, without the default route."""
    result = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]")
    targets = [str(route.get("dst", "default")) for route in result if route.get("table") != "local"]
    return [IPv4Network(str(ip_network(target, strict=False))) for target in targets if target != "default"]
