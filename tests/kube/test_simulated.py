"""A hundred simulated nodes behave as nodes do, and annotations decide how their pods end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from pods import PODS, phase, simulated_pod, wait_until, why_pending

from kube_cluster.api import GPU, Api
from kube_cluster.cluster import Cluster

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("kwok_cluster")]


def test_a_hundred_nodes_are_ready_and_run_two_hundred_pods(kwok_cluster: Cluster, api: Api) -> None:
    assert len(kwok_cluster.simulated) == 100
    nodes = api.items("/api/v1/nodes", labelSelector="type=kwok")
    assert [node["status"]["allocatable"][GPU] for node in nodes] == ["8"] * 100
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: api.create(PODS, simulated_pod(f"pod-{number}", gpus=4)), range(201)))
    wait_until(lambda: len(running(api)) == 200, "200 pods are running")
    by_node = [pod["spec"]["nodeName"] for pod in api.items(PODS) if "nodeName" in pod["spec"]]
    assert sorted(by_node) == sorted(kwok_cluster.simulated * 2), "two pods of 4 GPUs fill each node of 8"
    (waiting,) = api.items(PODS, fieldSelector="status.phase=Pending")
    wait_until(lambda: "Insufficient nvidia.com/gpu" in why_pending(api, waiting["metadata"]["name"]), "it says why")


def test_a_pod_ends_with_the_exit_code_that_it_was_given(api: Api) -> None:
    api.create(PODS, simulated_pod("works", run_for="100ms"))
    api.create(PODS, simulated_pod("fails", run_for="100ms", exit_code="3"))
    api.create(PODS, simulated_pod("stays"))
    wait_until(lambda: phase(api, "works") == "Succeeded", "the first pod has succeeded")
    wait_until(lambda: phase(api, "fails") == "Failed", "the second pod has failed")
    wait_until(lambda: phase(api, "stays") == "Running", "the third pod runs")
    (status,) = api.get(f"{PODS}/fails")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["exitCode"] == 3


def test_a_deleted_pod_terminates_for_its_own_time(api: Api) -> None:
    api.create(PODS, simulated_pod("quick"))
    api.create(PODS, simulated_pod("slow", terminating_for="1h"))
    wait_until(lambda: len(running(api)) == 2, "both pods run")
    api.delete(f"{PODS}/slow")
    api.delete(f"{PODS}/quick")
    wait_until(lambda: phase(api, "quick") == "", "the first pod has left")
    assert api.get(f"{PODS}/slow")["metadata"]["deletionTimestamp"]


def running(api: Api) -> list[str]:
    pods = api.items(PODS, fieldSelector="status.phase=Running")
    return [pod["metadata"]["name"] for pod in pods]
