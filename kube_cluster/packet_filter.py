"""Turn network policies into a packet filter of nftables, which decides which pod may reach what.

Pure. One filter serves all nodes of a cluster. A connection is checked after the addresses of Services have been
translated; what answers to one that is allowed passes. Pods have IPv4 addresses only, and no IPv6 packet is forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TABLE = "makeway-policies"
NAME = "kubernetes.io/metadata.name"
"""The label of each namespace that holds its name."""
REFUSED = "reject with icmp type admin-prohibited"
"""A refused connection fails at once with `No route to host`, unlike one to a port where nothing listens."""
PROTOCOLS = {"TCP": "tcp", "UDP": "udp", "SCTP": "sctp"}
Object = Mapping[str, Any]
Port = tuple[str, int | str]
"""Protocol, and number or name."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What policies see of a pod with an address of its own."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ports: Mapping[Port, int] = field(default_factory=dict)
    """the numbers of its named ports, and of those that listen at another one"""


def filter_of(policies: Sequence[Object], namespaces: Mapping[str, Mapping[str, str]], pods: Sequence[Endpoint]) -> str:
    """Return the input for `nft` that replaces the filter; `namespaces` are the labels of each, by name."""
    chains: dict[str, list[str]] = {}
    jumps: dict[str, list[str]] = {"in": [], "out": []}
    for pod in pods:
        for way, direction in (("in", "Ingress"), ("out", "Egress")):
            selecting = [one for one in policies if direction in _directions(one["spec"]) and _selects(one, pod)]
            if selecting:
                chain = f"{way}_{pod.address}"
                jumps[way].append(f"{pod.address} : jump {chain}")
                own = f"ip saddr {pod.address} ip daddr {pod.address} return"
                rules = [rule for one in selecting for rule in _rules(one, way, pod, namespaces, pods)]
                chains[chain] = [own, *dict.fromkeys(rules), REFUSED]
    outgoing = [f"ip saddr vmap {{ {', '.join(jumps['out'])} }}"] if jumps["out"] else []
    incoming = [f"ip daddr vmap {{ {', '.join(jumps['in'])} }}"] if jumps["in"] else []
    known = ["ct state established,related accept"]
    # A node reaches its own pods whatever policies say: the kubelet probes them. So nothing looks at its output.
    hooks = {"forward": [*known, *outgoing, *incoming], "input": [*known, *outgoing]}
    body = [_chain(name, rules) for name, rules in chains.items()]
    body += [
        _chain(name, [f"type filter hook {name} priority 0; policy accept;", *rules]) for name, rules in hooks.items()
    ]
    closed = _chain("forward", ["type filter hook forward priority 0; policy drop;"])
    return _table("ip", body) + _table("ip6", [closed])


def _table(family: str, chains: Iterable[str]) -> str:
    return (
        f"add table {family} {TABLE}\ndelete table {family} {TABLE}\ntable {family} {TABLE} {{\n{''.join(chains)}}}\n"
    )


def _chain(name: str, rules: Iterable[str]) -> str:
    return f"chain {name} {{\n" + "".join(f"  {rule}\n" for rule in rules) + "}\n"


def _directions(spec: Object) -> Sequence[str]:
    return spec.get("policyTypes") or ("Ingress", *(("Egress",) if spec.get("egress") else ()))


def _selects(policy: Object, pod: Endpoint) -> bool:
    return policy["metadata"]["namespace"] == pod.namespace and matches(policy["spec"].get("podSelector"), pod.labels)


def _rules(
    policy: Object, way: str, own: Endpoint, namespaces: Mapping[str, Mapping[str, str]], pods: Sequence[Endpoint]
) -> Iterator[str]:
    """Return what a policy lets a pod receive or send."""
    given, side, other = ("ingress", "from", "saddr") if way == "in" else ("egress", "to", "daddr")
    for rule in policy["spec"].get(given) or ():
        ports = rule.get("ports") or ()
        if not rule.get(side):
            yield from (f"{port} return".strip() for port in _numbers(ports, own if way == "in" else None))
        for peer in rule.get(side) or ():
            if block := peer.get("ipBlock"):
                for port in _numbers(ports, own if way == "in" else None) if ":" not in block["cidr"] else ():
                    yield " ".join([*_block(block, other), *([port] if port else []), "return"])
                continue
            reached: dict[str, list[str]] = {}
            for pod in pods:
                if _is_peer(peer, pod, policy["metadata"]["namespace"], namespaces):
                    for port in _numbers(ports, own if way == "in" else pod):
                        reached.setdefault(port, []).append(pod.address)
            for port, addresses in reached.items():
                yield " ".join([f"ip {other} {{ {', '.join(addresses)} }}", *([port] if port else []), "return"])


def _block(block: Object, other: str) -> list[str]:
    inside = [] if block["cidr"] == "0.0.0.0/0" else [f"ip {other} {block['cidr']}"]
    return inside + [f"ip {other} != {one}" for one in block.get("except") or () if ":" not in one]


def _numbers(ports: Sequence[Object], target: Endpoint | None) -> Iterator[str]:
    """Return the condition of each port that connections go to; an empty one where all do.

    `target` is the pod that they go to. Without one, a named port is none.
    """
    if not ports:
        yield ""
    for item in ports:
        protocol, port = item.get("protocol", "TCP"), item.get("port")
        if port is None:
            yield f"meta l4proto {PROTOCOLS[protocol]}"
            continue
        number = target.ports.get((protocol, port), port) if target else port
        if isinstance(number, int):
            last = f"-{item['endPort']}" if "endPort" in item else ""
            yield f"{PROTOCOLS[protocol]} dport {number}{last}"


def _is_peer(peer: Object, pod: Endpoint, namespace: str, namespaces: Mapping[str, Mapping[str, str]]) -> bool:
    if (selector := peer.get("namespaceSelector")) is None:
        if pod.namespace != namespace:
            return False
    elif not matches(selector, {NAME: pod.namespace, **namespaces.get(pod.namespace, {})}):
        return False
    return matches(peer.get("podSelector"), pod.labels)


def matches(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector matches; none at all, or an empty one, matches everything."""
    selector = selector or {}
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(one, labels) for one in selector.get("matchExpressions") or ())


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[str(expression["operator"])]
