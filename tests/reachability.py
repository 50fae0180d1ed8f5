"""Decide from network policies which pods may reach which, as a network plugin that enforces them would.

Only what the chart uses: pod and namespace selectors by labels, blocks of addresses, numbered ports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

Object = Mapping[str, Any]
NAME = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    """A pod by its namespace and labels; its address lies in a private network."""

    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.244.0.9"


@dataclass(frozen=True)
class Outside:
    """An address that is no pod."""

    address: str


Peer = Pod | Outside


class Policies:
    """The network policies of a cluster."""

    def __init__(self, manifests: Iterable[Object], namespace: str) -> None:
        """`namespace` is that of manifests that name none."""
        self._all = [one for one in manifests if one["kind"] == "NetworkPolicy"]
        self._namespace = namespace

    def may_reach(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection is allowed by the policies of both ends."""
        return self._allowed("Egress", source, target, port, protocol) and self._allowed(
            "Ingress", target, source, port, protocol
        )

    def _allowed(self, direction: str, own: Peer, other: Peer, port: int, protocol: str) -> bool:
        if isinstance(own, Outside):
            return True
        rules, end = ("egress", "to") if direction == "Egress" else ("ingress", "from")
        selecting = [one for one in self._all if direction in one["spec"]["policyTypes"] and self._selects(one, own)]
        if not selecting:
            return True  # a pod that no policy selects is open
        return any(
            self._has_port(rule, port, protocol)
            and (not rule.get(end) or any(self._is_peer(peer, other, policy) for peer in rule[end]))
            for policy in selecting
            for rule in policy["spec"].get(rules) or ()
        )

    def _selects(self, policy: Object, pod: Pod) -> bool:
        return self._of(policy) == pod.namespace and _matches(policy["spec"]["podSelector"], pod.labels)

    def _of(self, policy: Object) -> str:
        return str(policy["metadata"].get("namespace", self._namespace))

    @staticmethod
    def _has_port(rule: Object, port: int, protocol: str) -> bool:
        ports = rule.get("ports")
        return not ports or any(one["port"] == port and one.get("protocol", "TCP") == protocol for one in ports)

    def _is_peer(self, peer: Object, other: Peer, policy: Object) -> bool:
        if block := peer.get("ipBlock"):
            address = ip_address(other.address)
            excluded = any(address in ip_network(one) for one in block.get("except", ()))
            return address in ip_network(block["cidr"]) and not excluded
        if isinstance(other, Outside):
            return False
        if (names := peer.get("namespaceSelector")) is not None:
            if not _matches(names, {NAME: other.namespace}):
                return False
        elif other.namespace != self._of(policy):
            return False
        return _matches(peer.get("podSelector") or {}, other.labels)


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    unknown = set(selector) - {"matchLabels"}
    assert not unknown, f"the checker does not know {unknown}"
    return all(labels.get(name) == value for name, value in (selector.get("matchLabels") or {}).items())
