"""Machines that the cluster's autoscaler adds: placeholders, what is said of them, and the nodes that they become."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from cluster_machines import CONFIG, DEPLOYMENT, EVENTS, GPU, NOW, PODS, REQUEST, SELECTOR, SETTINGS, Server, listed
from makeway_quota.autoscale.instances import Instance, match_instances
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.provider import CallOutcomeUnknown, Denied, InvalidLaunch, QuotaReached, StockOut
from makeway_quota.autoscale.transitions import apply_event
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.cluster.nodes import ClusterNode
from makeway_quota.backends.kubernetes.cluster.pod_requests import project_share
from makeway_quota.backends.kubernetes.machines.held_nodes import held_nodes
from makeway_quota.backends.kubernetes.machines.objects import placeholder, scale_up_of
from makeway_quota.backends.kubernetes.machines.provider import KubernetesProvider
from makeway_quota.backends.machines.machine_source import MachineStatus


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def provider(server: Server) -> KubernetesProvider:
    known = {"cloud": SELECTOR}
    return KubernetesProvider(lambda: server, SETTINGS, known.get, "low", decision_seconds=0.05)


@pytest.mark.covers("F71")
def test_a_machine_is_a_placeholder_of_its_shape_in_its_pool(server: Server, provider: KubernetesProvider) -> None:
    made = provider.launch(REQUEST, "m-1")
    assert (made.id, made.machine, made.deployment) == ("makeway-machine-m-1", "m-1", "grows")
    spec = server.pod()["spec"]
    (container,) = spec["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "8000m", "memory": "65536Mi", GPU: "8"},
        "limits": {GPU: "8"},
    }
    zone, kind = "topology.kubernetes.io/zone", "node.kubernetes.io/instance-type"
    assert spec["nodeSelector"] == {"pool": "cloud", kind: "p5.48xlarge", zone: "a"}
    assert spec["tolerations"] == [{"operator": "Exists", "key": GPU}]
    assert (spec["priorityClassName"], spec["automountServiceAccountToken"]) == ("low", False)
    assert provider.launch(REQUEST, "m-1") == made, "a repeated call makes nothing new"
    assert server.made == 2
    with pytest.raises(CallOutcomeUnknown):
        provider.launch(REQUEST.replace("65536", "1024"), "m-1")


@pytest.mark.covers("F83")
@pytest.mark.parametrize(
    ("component", "reason", "message", "why"),
    [
        (
            "cluster-autoscaler",
            "NotTriggerScaleUp",
            "pod didn't trigger scale-up: 2 max node group size reached",
            "2 max node group size reached",
        ),
        (
            "karpenter",
            "FailedScheduling",
            'Failed to schedule pod, incompatible with nodepool "gpu"',
            'incompatible with nodepool "gpu"',
        ),
    ],
    ids=["Cluster Autoscaler", "Karpenter"],
)
def test_a_type_that_the_autoscaler_cannot_add_is_out_of_stock_and_leaves_nothing(
    server: Server, provider: KubernetesProvider, component: str, reason: str, message: str, why: str
) -> None:
    def answer(method: str, path: str) -> None:
        if method == "GET" and path == EVENTS and len(server.objects) == 2:
            server.says(reason, message, by=component)

    server.answer = answer
    with pytest.raises(StockOut, match=f"the cluster's autoscaler adds no node: {why}"):
        provider.launch(REQUEST, "m-1")
    assert server.names() == []


@pytest.mark.covers("F83")
@pytest.mark.parametrize("taint", ["karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"])
def test_a_node_that_the_autoscaler_is_about_to_remove_is_taken_back_so_that_its_jobs_get_a_notice(
    server: Server, provider: KubernetesProvider, taint: str
) -> None:
    provider.launch(REQUEST, "m-1")
    server.joins("node-1", gpus=8)
    server.pod()["spec"]["nodeName"] = "node-1"
    (result,) = listed(provider)
    assert (result.state, result.revoked) == ("running", False)
    server.objects["/api/v1/nodes/node-1"]["spec"]["taints"] = [{"key": taint, "effect": "NoSchedule"}]
    (result,) = listed(provider)
    assert (result.state, result.revoked) == ("running", True)


@pytest.mark.covers("F83")
def test_a_node_is_a_machine_only_once_its_gpus_are_there(server: Server, provider: KubernetesProvider) -> None:
    provider.launch(REQUEST, "m-1")
    assert [one.state for one in listed(provider)] == ["pending"]
    server.joins("node-1", gpus=0)
    server.pod()["spec"]["nodeName"] = "node-1"
    (result,) = listed(provider)
    assert (result.node, result.state) == ("", "pending"), "its device plugin has not registered yet"
    assert server.pod(kind="keep")["spec"]["nodeName"] == "node-1"
    assert server.pod(kind="keep")["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    server.joins("node-1", gpus=8)
    (result,) = listed(provider)
    assert (result.node, result.gpus, result.attempts, result.state) == ("node-1", 8, 0, "running")
    assert server.names() == ["makeway-machine-m-1", "makeway-machine-m-1-keep"], "the placeholder makes way"


def test_work_on_the_node_of_a_machine_is_counted(server: Server, provider: KubernetesProvider) -> None:
    provider.launch(REQUEST, "m-1")
    server.joins("node-1", gpus=8)
    server.pod()["spec"]["nodeName"] = "node-1"
    labels = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "portal", "makeway/kind": "job"}
    for number, phase in enumerate(("Running", "Succeeded")):
        pod = {"metadata": {"name": f"j{number}", "labels": labels}, "spec": {"nodeName": "node-1"}}
        server.objects[f"{PODS}/j{number}"] = {**pod, "status": {"phase": phase}}
    assert [one.attempts for one in listed(provider)] == [1]


@pytest.mark.covers("F83")
def test_a_machine_that_is_ended_lets_its_node_go_and_is_over_when_the_node_is_gone(
    server: Server, provider: KubernetesProvider
) -> None:
    provider.launch(REQUEST, "m-1")
    server.joins("node-1", gpus=8)
    server.pod()["spec"]["nodeName"] = "node-1"
    listed(provider)
    assert provider.terminate("makeway-machine-m-1")
    assert server.names() == ["makeway-machine-m-1"], "nothing keeps the node"
    assert [one.state for one in listed(provider)] == ["stopping"]
    assert provider.terminate("makeway-machine-m-1"), "may be repeated"
    del server.objects["/api/v1/nodes/node-1"]
    assert [one.state for one in listed(provider)] == ["terminated"]
    assert (server.names(), listed(provider)) == ([], [])
    assert not provider.terminate("makeway-machine-m-1")


def test_a_machine_whose_node_is_taken_by_a_newer_one_is_over(server: Server, provider: KubernetesProvider) -> None:
    for machine in ("m-1", "m-2"):
        provider.launch(REQUEST.replace("m-1", machine), machine)
        server.joins("node-1", gpus=8)
        server.pod(machine)["spec"]["nodeName"] = "node-1"
        listed(provider)
        if machine == "m-1":
            provider.terminate("makeway-machine-m-1")
    assert {one.machine: one.node for one in listed(provider)} == {"m-2": "node-1"}


def test_a_record_of_a_launch_that_broke_off_is_removed(server: Server, provider: KubernetesProvider) -> None:
    provider.launch(REQUEST, "m-1")
    del server.objects[f"{PODS}/makeway-machine-m-1-place"]
    assert [one.state for one in listed(provider)] == ["pending"], "it may be under way"
    assert [one.state for one in listed(provider, NOW + 200)] == ["terminated"]
    assert server.names() == []


def test_a_placeholder_whose_record_was_removed_while_it_was_created_is_deleted(
    server: Server, provider: KubernetesProvider
) -> None:
    provider.launch(REQUEST, "m-1")
    del server.objects[f"{CONFIG}/makeway-machine-m-1"]
    assert (listed(provider), len(server.names())) == ([], 1), "its record may not have been read yet"
    assert provider.list("another", NOW + 200).instances == ()
    assert server.names() == ["makeway-machine-m-1-place"], "it is of this deployment"
    assert listed(provider, NOW + 200) == []
    assert server.names() == []


def test_a_placeholder_that_may_have_been_created_keeps_its_record(
    server: Server, provider: KubernetesProvider
) -> None:
    create = server.create

    async def lost(path: str, body: Object) -> Object:
        result = await create(path, body)
        if path == PODS:
            raise ApiStatusError(504, "Timeout", "the request has timed out")
        return result

    server.create = lost  # type: ignore[method-assign]
    with pytest.raises(CallOutcomeUnknown):
        provider.launch(REQUEST, "m-1")
    assert server.names() == ["makeway-machine-m-1", "makeway-machine-m-1-place"]
    assert provider.terminate("makeway-machine-m-1")
    assert server.names() == []


def test_a_machine_that_cannot_be_brought_up_to_date_holds_up_no_other_one(
    server: Server, provider: KubernetesProvider
) -> None:
    for machine in ("m-1", "m-2", "m-3"):
        provider.launch(REQUEST.replace("m-1", machine), machine)
        server.joins(f"node-of-{machine}", gpus=8)
        server.pod(machine)["spec"]["nodeName"] = f"node-of-{machine}"
    del server.objects[f"{CONFIG}/makeway-machine-m-3"]["data"]
    create = server.create

    async def refused(path: str, body: Object) -> Object:
        if body["metadata"]["name"] == "makeway-machine-m-1-keep":
            raise ApiStatusError(403, "Forbidden", "exceeded quota: pods")
        return await create(path, body)

    server.create = refused  # type: ignore[method-assign]
    result = provider.list("grows", NOW + 10)
    assert [(one.machine, one.state) for one in result.instances] == [("m-2", "running")]
    assert not result.complete, "what is not in it may be there"


def test_an_autoscaler_that_gives_up_later_ends_the_machine_as_out_of_stock(
    server: Server, provider: KubernetesProvider
) -> None:
    made = provider.launch(REQUEST, "m-1")
    server.says("TriggeredScaleUp", "pod triggered scale-up: [{cloud 0->1}]")
    server.says("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 in backoff after failed scale-up")
    (result,) = listed(provider)
    assert result.refused == "the cluster's autoscaler adds no node: 1 in backoff after failed scale-up"
    row = machine(state="booting", instance=made.id)
    for one, event in match_instances(DEPLOYMENT, [row], provider.list("grows", NOW + 60), {}).events:
        row = apply_event(one if row is one else row, event, NOW, DEPLOYMENT.timeouts("g8"))
    assert (row.state, row.reason) == ("terminating", "no_node")


@pytest.mark.covers("F83")
def test_a_listed_node_takes_its_machine_to_ready_and_reports_for_it() -> None:
    row = machine(state="booting", instance="i")
    result = Instance("i", "m-1", "grows", node="node-1", gpus=8, attempts=2)
    for seen in _observations(row, result):
        row = apply_event(row, seen, NOW, DEPLOYMENT.timeouts("g8"))
    assert (row.state, row.cluster_node, row.attempts, row.heard_at) == ("ready", "node-1", 2, NOW)


def _observations(row: Machine, found: Instance) -> list[Any]:
    from makeway_quota.autoscale.instances import InstanceList

    return [event for _, event in match_instances(DEPLOYMENT, [row], InstanceList(NOW, (found,)), {}).events]


def machine(**fields: Any) -> Machine:
    usual = Machine("m-1", "grows", "cloud", "g8", "a", "on_demand", None, 8, REQUEST, NOW - 60, NOW - 60)
    return replace(usual, **fields)


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (ApiStatusError(403, "Forbidden", "exceeded quota: gpus, requested: 8"), QuotaReached),
        (ApiStatusError(403, "Forbidden", "denied by a policy"), InvalidLaunch),
        (ApiStatusError(403, "Forbidden", "cannot create resource pods"), Denied),
        (ApiStatusError(422, "Invalid", "spec is invalid"), InvalidLaunch),
        (ApiUnreachable("it does not answer"), CallOutcomeUnknown),
    ],
)
def test_refusals_of_the_api_server_are_those_of_a_provider(
    server: Server, provider: KubernetesProvider, refusal: Exception, expected: type[Exception]
) -> None:
    def answer(method: str, path: str) -> None:
        if (method, path) == ("POST", PODS):
            raise refusal

    server.answer = answer
    with pytest.raises(expected):
        provider.launch(REQUEST, "m-1")


def test_a_pool_that_the_policy_does_not_have_launches_nothing(server: Server, provider: KubernetesProvider) -> None:
    with pytest.raises(InvalidLaunch, match="no pool 'other'"):
        provider.launch(REQUEST.replace('"pool":"cloud"', '"pool":"other"'), "m-1")
    assert server.objects == {}


def test_a_placeholder_holds_nothing_and_is_not_foreign() -> None:
    pod = placeholder(SETTINGS, json.loads(REQUEST), SELECTOR, "")
    pod["spec"]["nodeName"] = "node-1"
    assert project_share(pod, "portal", "jobs") is None
    assert project_share(pod, "another", "jobs") is not None, "that of another installation is"


def test_of_what_an_autoscaler_said_the_newest_counts() -> None:
    def said(reason: str, at: str, by: str = "cluster-autoscaler") -> Object:
        return {"reason": reason, "message": reason, "lastTimestamp": at, "source": {"component": by}}

    coming, refused = (
        said("TriggeredScaleUp", "2026-01-01T00:00:05Z"),
        said("NotTriggerScaleUp", "2026-01-01T00:01:05Z"),
    )
    result = [scale_up_of(one) for one in ([coming, refused], [refused, {**coming, "lastTimestamp": "2026-01-02"}])]
    assert [one and one.coming for one in result] == [False, True]
    assert scale_up_of([said("Nominated", "2026", "kueue"), said("FailedScheduling", "2026")]) is None
    assert scale_up_of([said("Nominated", "2026", "karpenter")])
    karpenter = [said("Nominated", "2026-01-01", "karpenter"), said("FailedScheduling", "2026-01-02", "karpenter")]
    assert [one and one.coming for one in (scale_up_of(karpenter[:1]), scale_up_of(karpenter))] == [True, False]


def status(**fields: Any) -> MachineStatus:
    return replace(MachineStatus("m-1", "cloud", "ready", 8, of_cluster=True, requested_at=NOW), **fields)


@pytest.mark.parametrize(
    ("machines", "cordoned"),
    [
        ((), []),
        ((status(node="new"),), []),
        ((status(node="new", condition="draining"),), ["new"]),
        ((status(node="new", condition="ending"), status(name="m-2", node="new")), []),
        ((status(condition="starting"),), ["new"]),  # it may be the one that its placeholder waits for
        ((status(condition="starting", pool="other"),), []),
        ((status(condition="starting", of_cluster=False),), []),
    ],
)
def test_nodes_of_machines_take_work_only_while_these_are_ready(
    machines: tuple[MachineStatus, ...], cordoned: list[str]
) -> None:
    nodes = {name: NodeStatus(name, "cloud", (0,)) for name in ("old", "new")}
    known = {name: ClusterNode(name, name, {}, {}) for name in nodes}
    known = {"old": replace(known["old"], created=NOW - 9000), "new": replace(known["new"], created=NOW + 90)}
    result = held_nodes(nodes, known, machines)
    assert [name for name, node in result.items() if node.cordoned] == cordoned
