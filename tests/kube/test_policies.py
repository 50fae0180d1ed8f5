"""The real nodes of the test cluster enforce network policies: each case is tried by pods that connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pods import PODS, phase, wait_until
from probing import REFUSED, in_pod, on_node

from kube_cluster.api import Object
from kube_cluster.cluster import Cluster
from kube_cluster.images import host_pod
from kube_cluster.packet_filter import Endpoint, filter_of, matches

pytestmark = pytest.mark.kube

POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
FAR_PODS = "/api/v1/namespaces/far/pods"
SERVE = """
import socket, threading

def serve(port):
    with socket.create_server(("", port)) as listening:
        while True:
            listening.accept()[0].close()

threading.Thread(target=serve, args=(8001,)).start()
serve(8000)
"""
SERVER = {"podSelector": {"matchLabels": {"app": "server"}}}
FRIEND = {"podSelector": {"matchLabels": {"may": "yes"}}}
NOT_FRIEND = {"podSelector": {"matchExpressions": [{"key": "may", "operator": "DoesNotExist"}]}}
EVERY_FRIEND = {**FRIEND, "namespaceSelector": {}}
TEAM = {"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}}
WEB, FIRST, SECOND = "web", 8000, 8001
ALL = {(client, port) for client in ("friend", "other", "far") for port in (FIRST, SECOND)}


@pytest.fixture(scope="module")
def addresses(control_plane: Cluster, real_node: object) -> Iterator[dict[str, str]]:
    """Return the addresses of a server and of three pods that connect to it, one of them in another namespace."""
    api = control_plane.api
    api.create("/api/v1/namespaces", {"metadata": {"name": "far", "labels": {"team": "a"}}})
    wait_until(lambda: api.items("/api/v1/namespaces/far/serviceaccounts"), "the namespace has its service account")
    pods = {"server": (PODS, {"app": "server"}, SERVE)} | {
        name: (path, labels, "import signal; signal.pause()")
        for name, path, labels in (("friend", PODS, {"may": "yes"}), ("other", PODS, {}), ("far", FAR_PODS, {}))
    }
    for name, (path, labels, code) in pods.items():
        pod = host_pod(name, ["python3", "-c", code])
        pod["metadata"]["labels"] = labels
        pod["spec"]["containers"][0]["ports"] = [{"name": WEB, "containerPort": FIRST}]
        api.create(path, pod)
    for name, (path, _, _) in pods.items():
        wait_until(lambda name=name, path=path: phase(api, name, path) == "Running", f"the pod {name} runs")
    yield {name: api.get(f"{path}/{name}")["status"]["podIP"] for name, (path, _, _) in pods.items()}
    for path in (PODS, FAR_PODS):
        api.delete(path, gracePeriodSeconds="0")
    api.delete("/api/v1/namespaces/far")
    wait_until(lambda: not api.items("/api/v1/namespaces", fieldSelector="metadata.name=far"), "the namespace is gone")


def rule(*peers: Object, ports: tuple[int | str, ...] = (), side: str = "from") -> Object:
    """Return a rule of a policy."""
    return {**({side: list(peers)} if peers else {}), **({"ports": [{"port": one} for one in ports]} if ports else {})}


def only(name: str, **more: Any) -> Callable[[dict[str, str]], Object]:
    """Return a function that makes the block of one pod's address."""
    return lambda addresses: {"ipBlock": {"cidr": f"{addresses[name]}/32", **more}}


def all_but(name: str) -> Callable[[dict[str, str]], Object]:
    """Return a function that makes the block of everything but one pod's address."""
    return lambda addresses: {"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"{addresses[name]}/32"]}}


CASES: dict[str, tuple[Object, set[tuple[str, int]]]] = {
    "nothing comes in": ({**SERVER, "policyTypes": ["Ingress"]}, set()),
    "everything comes in": ({**SERVER, "policyTypes": ["Ingress"], "ingress": [{}]}, ALL),
    "by a label and a number": ({**SERVER, "ingress": [rule(FRIEND, ports=(FIRST,))]}, {("friend", FIRST)}),
    "without a label, by a name": ({**SERVER, "ingress": [rule(NOT_FRIEND, ports=(WEB,))]}, {("other", FIRST)}),
    "by the namespace": ({**SERVER, "ingress": [rule(TEAM)]}, {("far", FIRST), ("far", SECOND)}),
    "by both": ({**SERVER, "ingress": [rule(EVERY_FRIEND)]}, {("friend", FIRST), ("friend", SECOND)}),
    "two rules": (
        {**SERVER, "ingress": [rule(ports=(SECOND,)), rule(FRIEND)]},
        {("friend", FIRST), *((client, SECOND) for client in ("friend", "other", "far"))},
    ),
    "a range": ({**SERVER, "ingress": [{"ports": [{"port": FIRST, "endPort": SECOND}]}]}, ALL),
    "another protocol": ({**SERVER, "ingress": [{"ports": [{"port": FIRST, "protocol": "UDP"}]}]}, set()),
    "by an address": ({**SERVER, "ingress": [rule(only("far"))]}, {("far", FIRST), ("far", SECOND)}),
    "but for an address": (
        {**SERVER, "ingress": [rule(all_but("far"), ports=(FIRST,))]},
        {("friend", FIRST), ("other", FIRST)},
    ),
    "nothing goes out": (
        {**FRIEND, "policyTypes": ["Egress"]},
        {one for one in ALL if one[0] != "friend"},
    ),
    "out by a label and a name": (
        {**FRIEND, "policyTypes": ["Egress"], "egress": [rule(SERVER, ports=(WEB,), side="to")]},
        ALL - {("friend", SECOND)},
    ),
    "out but for an address": (
        {**FRIEND, "policyTypes": ["Egress"], "egress": [rule(all_but("server"), side="to")]},
        {one for one in ALL if one[0] != "friend"},
    ),
}


def with_addresses(value: Any, addresses: dict[str, str]) -> Any:
    """Return a part of a policy with the addresses that were not known before."""
    if callable(value):
        return value(addresses)
    if isinstance(value, dict):
        return {key: with_addresses(one, addresses) for key, one in value.items()}
    return [with_addresses(one, addresses) for one in value] if isinstance(value, list) else value


def reached(cluster: Cluster, server: str) -> set[tuple[str, int]]:
    """Return which pod reaches which port of the server now; what is not reached is refused by a policy."""
    result = set()
    wanted = {str(port): {"to": f"{server}:{port}"} for port in (FIRST, SECOND)}
    for client, namespace in (("friend", "default"), ("other", "default"), ("far", "far")):
        for port, answer in in_pod(cluster, namespace, client, wanted).items():
            assert answer in ({"open": True}, {"problem": REFUSED}), answer
            if "open" in answer:
                result.add((client, int(port)))
    return result


@pytest.mark.parametrize("case", CASES)
def test_a_policy_lets_through_what_it_says(control_plane: Cluster, addresses: dict[str, str], case: str) -> None:
    spec, expected = CASES[case]
    policy = {"metadata": {"name": "tried"}, "spec": with_addresses(spec, addresses)}
    control_plane.api.create(POLICIES, policy)
    try:
        wait_until(lambda: reached(control_plane, addresses["server"]) == expected, f"only {sorted(expected)}", 30)
        own = {"own": {"to": f"{addresses['server']}:{FIRST}"}}
        assert on_node(control_plane, own) == {"own": {"open": True}}, "a node reaches its own pods"
    finally:
        control_plane.api.delete(f"{POLICIES}/tried")
    if expected != ALL:
        wait_until(lambda: reached(control_plane, addresses["server"]) == ALL, "without it, everything", 30)


def test_the_first_connection_of_a_pod_is_refused(control_plane: Cluster, addresses: dict[str, str]) -> None:
    """A plugin that learns of a pod's address from the API server would let it through for a moment."""
    policy = {"podSelector": {"matchLabels": {"app": "quick"}}, "policyTypes": ["Egress"]}
    code = f"import socket; socket.create_connection(('{addresses['server']}', {FIRST}), 10)"
    pod = host_pod("quick", ["python3", "-S", "-c", code])
    pod["metadata"]["labels"] = {"app": "quick"}
    api = control_plane.api
    api.create(POLICIES, {"metadata": {"name": "quick"}, "spec": policy})
    api.create(PODS, pod)
    wait_until(lambda: phase(api, "quick") in ("Failed", "Succeeded"), "the pod has tried")
    api.delete(f"{POLICIES}/quick")
    assert REFUSED in api.text(f"{PODS}/quick/log")


def test_a_selector_matches_as_in_kubernetes() -> None:
    labels = {"a": "1"}
    for operator, values, holds in (
        ("In", ["1", "2"], True),
        ("In", ["2"], False),
        ("NotIn", ["2"], True),
        ("NotIn", ["1"], False),
        ("Exists", None, True),
        ("DoesNotExist", None, False),
    ):
        assert matches({"matchExpressions": [{"key": "a", "operator": operator, "values": values}]}, labels) is holds
    assert matches({"matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["1"]}]}, labels)
    assert matches({"matchLabels": {"a": "1"}}, labels)
    assert not matches({"matchLabels": {"a": "2"}}, labels)
    assert matches({}, labels)
    assert matches(None, {})


def test_a_port_that_listens_elsewhere_is_allowed_by_its_known_number() -> None:
    """The DNS of the test cluster runs on this machine, and counts as a pod of kube-system."""
    dns = Endpoint("kube-system", {}, "10.77.0.1", {("UDP", 53): 40000})
    pod = Endpoint("default", {}, "10.128.0.2")
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    spec = {"policyTypes": ["Egress"], "egress": [{"to": [peer], "ports": [{"port": 53, "protocol": "UDP"}]}]}
    result = filter_of([{"metadata": {"namespace": "default"}, "spec": spec}], {}, [dns, pod])
    assert "ip daddr { 10.77.0.1 } udp dport 40000 return" in result
    assert "ip saddr vmap { 10.128.0.2 : jump out_10.128.0.2 }" in result
