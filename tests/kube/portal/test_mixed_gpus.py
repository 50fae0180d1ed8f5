"""The story with MIG slices, on a node that has whole GPUs, too, beside a time-sliced one: a pool for each resource."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from charts import Object
from makeway_api.models import Job, JobRequest
from pods import wait_until
from portals import STARTED, WORKERS, Portal
from second_plugins import MIG, SHARED, offered
from site_stories import pod_of, story
from walk import file_of

from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster
from kube_cluster.node import Node

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

TIMED = "/api/v1/nodes/simulated-0052"
LABEL = "nvidia.com/gpu.present"
POOLS = {"whole": GPU, "slices": MIG, "shared": SHARED}


def policy() -> str:
    """Return the policy of the page with a pool for each resource: One GPU is a slice, reserved for both teams."""
    document = yaml.safe_load(file_of(5, "policy.yaml"))
    (pool,), (cpu, gpu1) = document["pools"], document["profiles"]
    document["pools"] = [{**pool, "name": name, "resource": resource} for name, resource in POOLS.items()]
    others = [{**gpu1, "name": name, "pools": [name], "kinds": ["job"]} for name in ("whole", "shared")]
    document["profiles"] = [{**cpu, "pools": ["slices"]}, {**gpu1, "pools": ["slices"]}, *others]
    for team in document["policies"]:
        team["quotas"] = [{"pools": ["slices"], "reserved": 1}, {"pools": ["whole"]}, {"pools": ["shared"]}]
    return json.dumps(document)


@pytest.fixture
def pools(portal: Portal, kwok_cluster: Cluster, real_node: Node) -> Iterator[None]:
    """Have the real node offer slices, and a simulated one time-sliced GPUs; afterwards all is as it was."""
    before = kwok_cluster.api.get(TIMED)
    kinds = {GPU: "0", SHARED: "4"}
    restored: Object = {**dict.fromkeys(kinds), **before["status"]["allocatable"]}
    portal.clean()
    with portal.person("admin").client() as admin, ExitStack() as undo:
        undo.enter_context(offered(kwok_cluster, real_node, MIG))
        status = {"allocatable": kinds, "capacity": kinds}
        kwok_cluster.api.merge(f"{TIMED}/status", {"status": status})
        undo.callback(
            kwok_cluster.api.merge, f"{TIMED}/status", {"status": {"allocatable": restored, "capacity": restored}}
        )
        undo.callback(remove_images, portal)
        kwok_cluster.api.merge(TIMED, {"metadata": {"labels": {LABEL: "true"}}, "spec": {"taints": None}})
        taints = {"metadata": {"labels": {LABEL: None}}, "spec": {"taints": before["spec"]["taints"]}}
        undo.callback(kwok_cluster.api.merge, TIMED, taints)
        undo.callback(admin.policy_apply, admin.policy().document)
        undo.callback(portal.clean)
        admin.policy_apply(policy())
        yield


def remove_images(portal: Portal) -> None:
    """Remove the pod that pulls images on the simulated node: a taint that comes back ends none that runs."""
    for pod in portal.pods("images"):
        if TIMED.endswith(str(pod["spec"].get("nodeName"))):
            portal.api.delete(f"{portal.all_pods}/{pod['metadata']['name']}")


@pytest.mark.covers("N21", "F02", "F15")
@pytest.mark.usefixtures("pools")
def test_the_story_with_slices_of_a_node_with_whole_gpus_beside_a_time_sliced_one(
    portal: Portal, tmp_path: Path
) -> None:
    """Work in the other two pools, one of them on the same node, is neither moved nor stopped."""
    with portal.person("ana").client() as client:
        others = {
            name: client.submit(JobRequest(name=name, command=["sleep", "3600"], profile=name, team="rnd"))
            for name in ("whole", "shared")
        }

        def bound() -> bool:
            pods = portal.api.items(WORKERS)
            return len(pods) == len(others) and all(one["spec"].get("nodeName") for one in pods)

        wait_until(bound, "both pods are placed", STARTED)
        before = {name: pod_of(portal, job) for name, job in others.items()}
        assert TIMED.endswith(before["shared"]["spec"]["nodeName"])
        assert [resources(pod) for pod in before.values()] == [{GPU: "1"}, {SHARED: "1"}]

        for pod in story(portal, tmp_path):
            assert resources(pod) == {MIG: "1"}

        for job in others.values():
            now: Job = client.job(job.id)
            assert (now.state.ended, now.preemptions) == (False, 0), now
        assert pod_of(portal, others["whole"])["metadata"]["uid"] == before["whole"]["metadata"]["uid"]
        result = {one.name: {node.name: len(node.devices) for node in one.nodes} for one in client.pools()}
        assert result == {"whole": {"node-0": 2}, "slices": {"node-0": 2}, "shared": {"simulated-0052": 4}}


def resources(pod: Object) -> dict[str, str]:
    """Return the devices that a notebook, or the worker of a job, has."""
    (container,) = [one for one in pod["spec"]["containers"] if one["name"] in ("notebook", "worker")]
    return {name: amount for name, amount in container["resources"]["limits"].items() if "/" in name}
