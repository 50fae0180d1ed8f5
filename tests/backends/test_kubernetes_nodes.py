"""Nodes and pods of Kubernetes in the service's own terms: quantities, pools, taints, and what pods request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from makeway_quota.backends.kubernetes.api.quantities import allocatable, in_service_units, parse_quantity
from makeway_quota.backends.kubernetes.cluster.nodes import (
    NodeSelector,
    Taint,
    Toleration,
    first_devices,
    pools_of,
    project_node,
    selectors,
    toleration,
    unassigned,
    untolerated,
)
from makeway_quota.backends.kubernetes.cluster.pod_requests import pod_requests, project_share
from makeway_quota.policy import read_policy
from makeway_quota.wording.unassigned import unassigned_sentences

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.10gb"


def node(**changes: Any) -> dict[str, Any]:
    """Return a node as the API server has it, with changes to its spec and status."""
    spec = {name: changes.pop(name) for name in ("taints", "unschedulable") if name in changes}
    metadata = {"name": "n1", "uid": "u1", "labels": changes.pop("labels", {"gpu": "h100"}), **changes.pop("meta", {})}
    offered = changes.pop("allocatable", {"cpu": "95500m", "memory": "1056770036Ki", GPU: "8", "pods": "110"})
    conditions = changes.pop("conditions", {"Ready": "True", "MemoryPressure": "False"})
    assert not changes
    listed = [{"type": name, "status": status} for name, status in conditions.items()]
    return {"metadata": metadata, "spec": spec, "status": {"allocatable": offered, "conditions": listed}}


def container(name: str = "main", always: bool = False, limits: Any = None, **requests: str) -> dict[str, Any]:
    """Return a container that requests these amounts."""
    made: dict[str, Any] = {"name": name, "resources": {"requests": requests, "limits": limits or {}}}
    return {**made, "restartPolicy": "Always"} if always else made


@pytest.mark.parametrize(
    ("resource", "text", "up", "down"),
    [
        ("cpu", "1", 1000, 1000),
        ("cpu", "1500m", 1500, 1500),
        ("cpu", "100u", 1, 0),
        ("cpu", "0.25", 250, 250),
        ("memory", "1Gi", 1024, 1024),
        ("memory", "1G", 954, 953),
        ("memory", "128974848", 123, 123),
        ("memory", "1e3", 1, 0),
        ("memory", "129M", 124, 123),
        ("nvidia.com/gpu", "8", 8, 8),
        ("nvidia.com/gpu", "1k", 1000, 1000),
    ],
)
def test_quantities_are_exact_and_rounded_to_the_safe_side(resource: str, text: str, up: int, down: int) -> None:
    assert in_service_units(resource, text) == up
    assert in_service_units(resource, text, round_up=False) == down


@pytest.mark.parametrize("text", ["", "much", "1 Gi", "1gi", "1e", "--1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


def test_a_node_is_kept_in_the_units_of_the_service() -> None:
    kept = project_node(node())
    assert (kept.name, kept.uid, kept.ready, kept.unschedulable) == ("n1", "u1", True, False)
    assert kept.allocatable == {"cpu": 95500, "memory": 1032001, GPU: 8, "pods": 110}


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        ({"Ready": "True"}, True),
        ({"Ready": "False"}, False),
        ({"Ready": "Unknown"}, False),
        ({}, False),
        ({"Ready": "True", "NetworkUnavailable": "True"}, False),
        ({"Ready": "True", "DiskPressure": "True"}, True),  # the node is tainted for that
    ],
)
def test_conditions_say_whether_a_node_is_ready(conditions: dict[str, str], ready: bool) -> None:
    assert project_node(node(conditions=conditions)).ready is ready


def test_a_cordoned_or_deleted_node_takes_no_work() -> None:
    assert project_node(node(unschedulable=True)).unschedulable
    assert project_node(node(meta={"deletionTimestamp": "2026-01-01T00:00:00Z"})).unschedulable


@pytest.mark.covers("F83")
@pytest.mark.parametrize(
    ("key", "effect", "leaves"),
    [
        ("ToBeDeletedByClusterAutoscaler", "NoSchedule", True),
        ("karpenter.sh/disrupted", "NoSchedule", True),
        ("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule", False),
    ],
)
def test_a_node_that_an_autoscaler_removes_takes_no_work_whatever_pods_tolerate(
    key: str, effect: str, leaves: bool
) -> None:
    assert project_node(node(taints=[{"key": key, "value": "1", "effect": effect}])).unschedulable is leaves


@pytest.mark.parametrize(
    ("tolerated", "taint", "covers"),
    [
        (Toleration("a", "Exists"), Taint("a", "x", "NoSchedule"), True),
        (Toleration("a", "Exists"), Taint("b", "x", "NoSchedule"), False),
        (Toleration("a", "Equal", "x"), Taint("a", "x", "NoExecute"), True),
        (Toleration("a", "Equal", "x"), Taint("a", "y", "NoExecute"), False),
        (Toleration("a", "Exists", effect="NoSchedule"), Taint("a", "", "NoExecute"), False),
        (Toleration("", "Exists"), Taint("a", "x", "NoSchedule"), True),
        (Toleration(""), Taint("a", "", "NoSchedule"), False),
    ],
)
def test_tolerations_are_those_of_kubernetes(tolerated: Toleration, taint: Taint, covers: bool) -> None:
    assert tolerated.covers(taint) is covers


def test_only_taints_that_are_not_tolerated_and_keep_pods_away_count() -> None:
    taints = [
        {"key": GPU, "value": "present", "effect": "NoSchedule"},
        {"key": "prefer", "effect": "PreferNoSchedule"},
        {"key": "team", "value": "x", "effect": "NoExecute"},
    ]
    kept = project_node(node(taints=taints))
    selector = NodeSelector("h100", GPU, {"gpu": "h100"}, (Toleration(GPU, "Exists"),))
    assert [str(taint) for taint in untolerated(kept, selector)] == ["team=x:NoExecute"]
    assert untolerated(kept, replace(selector, tolerations=(*selector.tolerations, toleration("team=x")))) == ()


@pytest.mark.parametrize(
    ("resource", "kept_away"),
    [
        (GPU, []),
        (MIG, []),
        ("nvidia.com/gpu.shared", []),
        ("amd.com/gpu", ["nvidia.com/gpu=present:NoSchedule"]),
    ],
)
def test_nodes_whose_gpus_are_cut_up_or_shared_keep_the_taint_of_whole_ones(
    resource: str, kept_away: list[str]
) -> None:
    taints = [
        {"key": GPU, "value": "present", "effect": "NoSchedule"},
        {"key": resource, "value": "present", "effect": "NoSchedule"},
    ]
    pool = f"{{name: a, resource: {resource}, nodes: {{labels: {{gpu: h100}}}}}}"
    (selector,) = selectors(read_policy(f"version: 1\npools: [{pool}]\nprofiles: []\npolicies: []\n"))
    assert [str(taint) for taint in untolerated(project_node(node(taints=taints)), selector)] == kept_away


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("a", Toleration("a", "Exists")),
        ("a=b", Toleration("a", "Equal", "b")),
        ("a:NoSchedule", Toleration("a", "Exists", effect="NoSchedule")),
        ("a.b/c=d:NoExecute", Toleration("a.b/c", "Equal", "d", "NoExecute")),
    ],
)
def test_tolerations_are_written_as_taints_are(text: str, read_as: Toleration) -> None:
    assert toleration(text) == read_as


@pytest.mark.parametrize("text", ["", "=b", "a:Never", ":NoSchedule", "a:", "a b", "a=b c", "A/b/c", "-a", "a=-"])
def test_a_toleration_that_is_none_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="expected key, key=value"):
        toleration(text)


SHARED = "nvidia.com/gpu.shared"


@pytest.mark.parametrize("offered", [GPU, MIG, SHARED, "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"])
def test_a_node_is_in_the_pool_of_whose_resource_it_has_some(offered: str) -> None:
    names = [GPU, MIG, SHARED, "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"]
    pools = [NodeSelector(name, name, {"gpu": "h100"}) for name in names]
    for order in (pools, pools[::-1]):
        kept = project_node(node(allocatable={**dict.fromkeys(names, "0"), offered: "7"}))
        (chosen,) = pools_of(kept, order)
        assert chosen.resource == offered, "what it once offered shows 0"
        assert unassigned(kept, order, [chosen]) == ()
        gone = project_node(node(allocatable=dict.fromkeys(names, "0")))
        assert pools_of(gone, order, [chosen.pool]) == (chosen,), "its device plugin restarts"
        assert pools_of(gone, order) == (order[0],)


@pytest.mark.covers("F02")
def test_a_node_is_in_one_pool_for_each_resource_that_it_offers() -> None:
    names = [GPU, MIG, SHARED, "amd.com/gpu"]
    pools = [NodeSelector(name, name, {"gpu": "h100"}) for name in names]
    second = NodeSelector("second", MIG, {"gpu": "h100"})
    kept = project_node(node(allocatable={GPU: "6", MIG: "7", SHARED: "0", "amd.com/gpu": "1"}))
    chosen = pools_of(kept, [*pools, second])
    assert [one.pool for one in chosen] == [GPU, MIG, "amd.com/gpu"], "the first of two pools of a resource"
    assert unassigned(kept, [*pools, second], chosen) == ()
    cut = project_node(node(allocatable={GPU: "0", MIG: "14"}))
    assert [one.pool for one in pools_of(cut, pools, [GPU, MIG])] == [MIG]
    assert [one.pool for one in pools_of(cut, pools, [GPU, MIG], {GPU})] == [GPU, MIG], "a pod still holds one"
    gone = project_node(node(allocatable={GPU: "0", MIG: "0"}))
    for held in [set(), {GPU}, {MIG}, {GPU, MIG}]:
        there = [one.pool for one in pools_of(gone, pools, [GPU, MIG], held)]
        assert there == [GPU, MIG], "its device plugin restarts, and pods hold some of it"
    assert [one.pool for one in pools_of(gone, pools, [GPU], {MIG})] == [GPU, MIG]
    assert [one.pool for one in pools_of(gone, pools, (), {MIG})] == [MIG]


def test_devices_keep_their_indices_while_other_resources_come_and_go() -> None:
    names = [GPU, MIG, SHARED, "amd.com/gpu", "gpu.intel.com/xe", "nvidia.com/mig-2g.20gb"]
    pools = [NodeSelector(name, name) for name in names]
    assert first_devices(pools[:1]) == {GPU: 0}, "as ever"
    every = first_devices(pools)
    assert len(set(every.values())) == len(names)
    for other in names[1:]:
        two = first_devices([pools[0], pools[names.index(other)]])
        assert two == {GPU: every[GPU], other: every[other]}
        assert first_devices([pools[names.index(other)], pools[0]]) == two
    assert all(first % 4096 == 0 for first in every.values())
    clash = [NodeSelector(f"p{at}", f"r/{at}") for at in range(2000)]
    assert len(set(first_devices(clash).values())) == 2000


def test_the_gpus_that_no_pool_takes_are_named() -> None:
    whole, odd = NodeSelector("whole", GPU, {"gpu": "h100"}), NodeSelector("odd", "example.com/fpga", {"gpu": "none"})
    offered = {"cpu": "4", "pods": "110", "hugepages-2Mi": "1Gi", "rdma/hca": "8", "devices.kubevirt.io/kvm": "1k"}
    gpus = {MIG: "7", GPU: "1", SHARED: "0", "amd.com/gpu": "2", "gpu.intel.com/xe": "1", "example.com/fpga": "3"}
    kept = project_node(node(allocatable=offered | gpus | {"gpu.intel.com/xe_monitoring": "1"}))
    remaining = (("amd.com/gpu", 2), ("example.com/fpga", 3), ("gpu.intel.com/xe", 1), (MIG, 7))
    assert unassigned(kept, [whole, odd], [whole]) == remaining
    assert unassigned(kept, [whole, odd], []) == (*remaining[:3], (GPU, 1), (MIG, 7)), "it is in no pool"
    assert unassigned_sentences({"n2": remaining, "n1": remaining[3:], "n3": ()})[-1] == (
        "No pool takes 14 nvidia.com/mig-1g.10gb of n1 and n2: add a pool with this resource whose labels these nodes "
        "have, or change the labels."
    )


def test_a_node_that_has_none_of_a_pools_resource_is_still_in_it() -> None:
    whole, parts = NodeSelector("whole", GPU, {"gpu": "h100"}), NodeSelector("parts", MIG, {"gpu": "h100"})
    assert pools_of(project_node(node(allocatable={"cpu": "4"})), [whole, parts]) == (whole,)
    assert pools_of(project_node(node(labels={"gpu": "a100"})), [whole, parts]) == ()


POLICY = """
version: 1
pools:
- {name: h100, nodes: {labels: {gpu: h100}}}
- {name: slices, resource: nvidia.com/mig-1g.10gb, nodes: {labels: {gpu: mig}}}
- {name: elsewhere}
profiles: []
policies: []
"""


def test_selectors_come_from_the_policy_document() -> None:
    result = selectors(read_policy(POLICY, "policy.yaml"), [toleration("batch")])
    assert [(one.pool, one.resource, one.labels) for one in result] == [
        ("h100", GPU, {"gpu": "h100"}),
        ("slices", MIG, {"gpu": "mig"}),
    ]
    assert [one.key for one in result[1].tolerations] == [MIG, GPU, "batch"]
    (only,) = selectors(read_policy("version: 1\npools: [{name: all}]\nprofiles: []\npolicies: []\n", "policy.yaml"))
    assert only.selects(project_node(node())), "a document's only pool has all nodes"


@pytest.mark.parametrize(
    ("spec", "cpu", "gpus"),
    [
        ({"containers": [container(cpu="1"), container("b", cpu="500m")]}, 1500, 0),
        ({"containers": [container(limits={GPU: "2"}, cpu="1")]}, 1000, 2),
        ({"containers": [container(cpu="1")], "initContainers": [container("i", cpu="3", **{GPU: "1"})]}, 3000, 1),
        ({"containers": [container(cpu="1")], "initContainers": [container("i", cpu="500m")]}, 1000, 0),
        # A sidecar goes on beside the containers, and beside the steps after it.
        ({"containers": [container(cpu="1")], "initContainers": [container("s", always=True, cpu="1")]}, 2000, 0),
        (
            {
                "containers": [container(cpu="1")],
                "initContainers": [container("s", always=True, cpu="2"), container("i", cpu="2")],
            },
            4000,
            0,
        ),
        (
            {
                "containers": [container(cpu="1")],
                "initContainers": [container("i", cpu="2"), container("s", always=True, cpu="2")],
            },
            3000,
            0,
        ),
        ({"containers": [container(cpu="1")], "overhead": {"cpu": "250m"}}, 1250, 0),
        (
            {
                "containers": [container(cpu="1", **{GPU: "1"})],
                "resources": {"requests": {"cpu": "4"}},
                "overhead": {"cpu": "1"},
            },
            5000,
            1,
        ),
        ({"containers": [{"name": "nothing"}]}, 0, 0),
    ],
)
def test_a_pod_requests_what_the_scheduler_counts(spec: dict[str, Any], cpu: int, gpus: int) -> None:
    result = pod_requests(spec)
    assert (result.get("cpu", 0), result.get(GPU, 0)) == (cpu, gpus)


def test_a_container_that_shrinks_counts_with_what_it_still_has() -> None:
    status = {"containerStatuses": [{"name": "main", "allocatedResources": {"cpu": "4"}}]}
    assert pod_requests({"containers": [container(cpu="1")]}, status) == {"cpu": 4000}


def pod(node: str | None = "n1", phase: str = "Running") -> dict[str, Any]:
    """Return a pod with one GPU."""
    spec = {"containers": [container(**{GPU: "1"})], **({"nodeName": node} if node else {})}
    return {"metadata": {"name": "p", "labels": {}}, "spec": spec, "status": {"phase": phase}}


def test_foreign_pods_hold_what_they_request_until_their_containers_have_ended() -> None:
    held = project_share(pod(), "here")
    assert held is not None
    assert (held.node, held.requests, held.workload) == ("n1", ((GPU, 1),), "")
    assert project_share(pod(node=None), "here") is None
    assert project_share(pod(phase="Failed"), "here") is None
    assert project_share(pod(phase="Succeeded"), "here") is None
    leaving = pod()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert project_share(leaving, "here") == held, "its containers still run"


def test_pods_of_this_installation_are_not_foreign() -> None:
    mine = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "here"}
    job, session, other = pod(), pod(), pod()
    session["metadata"]["labels"] = {**mine, "makeway/session": "s-1"}
    other["metadata"]["labels"] = {**mine, "makeway/instance": "there"}
    job["metadata"] |= {"labels": {**mine, "makeway/job": "j-1", "makeway/attempt": "2"}}
    runs = project_share(job, "here")
    assert runs is not None
    assert (runs.workload, runs.attempt, runs.ends_at) == ("j-1", 2, None), "it may outlive its job's row at any moment"
    job["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    deleted = project_share(job, "here")
    assert deleted is not None
    assert (deleted.workload, deleted.attempt, deleted.requests) == ("j-1", 2, ((GPU, 1),)), "its containers still run"
    assert (deleted.ends_at, deleted.grace) == (1767225600.0, 30.0)
    job["status"]["phase"] = "Failed"
    assert project_share(job, "here") is None
    result = project_share(session, "here")
    assert result is not None
    assert result.workload == "s-1"
    foreign = project_share(other, "here")
    assert foreign is not None
    assert foreign.workload == ""


@pytest.mark.parametrize("labels", [{"makeway/job": "j-1", "makeway/attempt": "2"}, {"makeway/job": "j-1"}])
def test_labels_of_our_jobs_are_believed_only_where_we_make_their_pods(labels: dict[str, str]) -> None:
    fake = pod()
    mine = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "here"}
    fake["metadata"] |= {"namespace": "theirs", "labels": {**mine, **labels}}
    share = project_share(fake, "here", "jobs")
    assert share is not None
    assert share.workload == "", "it is foreign"
    fake["metadata"]["namespace"] = "jobs"
    share = project_share(fake, "here", "jobs")
    assert share is not None
    assert share.workload == ("j-1" if "makeway/attempt" in labels else "")


def test_equal_requests_are_kept_once() -> None:
    one, other = project_share(pod(), "here"), project_share(pod(), "here")
    assert one is not None
    assert other is not None
    assert one.requests is other.requests


def test_room_keeps_a_resource_of_which_nothing_is_left() -> None:
    assert allocatable({GPU: "0", "cpu": "1"}) == {GPU: 0, "cpu": 1000}
