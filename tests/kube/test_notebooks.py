"""Notebooks as pods: the real Hub and quota service, KubeSpawner, and the real API server with simulated nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kube.notebooks import Notebooks, add_nodes, full, notebooks
from pods import PODS, phase, wait_until

from kube_cluster.api import GPU, Object
from kube_cluster.cluster import Cluster
from kube_cluster.simulated import toleration

pytestmark = pytest.mark.kube

NODES = ("virtual-1", "virtual-2")
GPU1 = {"profile": "gpu1", "team": "rnd"}
CPU = {"profile": "cpu"}
PRIORITY = "makeway-guaranteed"
MORE = f"""
c.MakewayKubeSpawner.guaranteed_priority_class = "{PRIORITY}"
c.MakewayKubeSpawner.lost_seconds = 1
c.MakewayKubeSpawner.unschedulable_seconds = 8
c.KubeSpawner.tolerations = [{toleration()}]  # a service that knows nothing of the cluster names none
"""
QUOTAS = "/api/v1/namespaces/default/resourcequotas"
POLICY = ("value", "preemptionPolicy")
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(scope="module")
def nodes(kwok_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with two more nodes, named as the virtual ones of the quota service."""
    add_nodes(kwok_cluster, NODES)
    kwok_cluster.api.create(CLASSES, {"metadata": {"name": PRIORITY}, "value": 1000, "preemptionPolicy": "Never"})
    yield kwok_cluster
    for path in (*(f"/api/v1/nodes/{name}" for name in NODES), f"{CLASSES}/{PRIORITY}"):
        kwok_cluster.api.delete(path)


@pytest.fixture(scope="module")
def portal(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebooks]:
    """A portal whose service knows nothing of the cluster but the names of two nodes."""
    with notebooks(tmp_path_factory.mktemp("portal"), nodes, MORE, MAKEWAY_VIRTUAL_NODES="2") as portal:
        yield portal


@pytest.fixture(autouse=True)
def nothing_left(portal: Notebooks) -> Iterator[None]:
    yield
    portal.clear()


def pod_path(pod: Object) -> str:
    """Return the path of a pod."""
    return f"{PODS}/{pod['metadata']['name']}"


def keep_terminating(portal: Notebooks, pod: Object) -> None:
    """Have a pod go on terminating once it is deleted, as one whose program saves, or whose node is gone."""
    portal.api.merge(pod_path(pod), {"metadata": {"annotations": {"makeway.test/terminating-for": "1h"}}})


@pytest.mark.covers("N06", "F42")
def test_the_pod_is_what_the_lease_says(portal: Notebooks) -> None:
    pod = portal.running("ana", **GPU1)
    (session,) = portal.live_sessions()
    assert session.phase == "running"
    (worker,) = session.placement
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    assert spec["nodeName"] == worker.node
    assert spec["priorityClassName"] == PRIORITY
    assert spec["terminationGracePeriodSeconds"] == 30
    assert labels["app.kubernetes.io/managed-by"] == "makeway"
    assert (labels["makeway/instance"], labels["makeway/session"]) == ("makeway", session.id)
    (container,) = spec["containers"]
    assert container["resources"]["limits"][GPU] == container["resources"]["requests"][GPU] == "1"
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["MAKEWAY_SESSION"] == session.id
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_a_notebook_without_gpus_may_run_on_any_node(portal: Notebooks) -> None:
    spec = portal.running("ana", **CPU)["spec"]
    assert "nodeAffinity" not in spec.get("affinity", {})
    assert GPU not in spec["containers"][0]["resources"].get("limits", {})


def test_named_servers_have_pods_and_leases_of_their_own(portal: Notebooks) -> None:
    first = portal.running("ana", **GPU1)
    second = portal.running("ana", "second", **GPU1)
    assert {session.server for session in portal.live_sessions()} == {"", "second"}
    portal.stop_server("ana", "second")
    (remaining,) = portal.live_sessions()
    assert remaining.id == first["metadata"]["labels"]["makeway/session"]
    assert [pod["metadata"]["uid"] for pod in portal.pods()] == [first["metadata"]["uid"]]
    assert second["metadata"]["name"] != first["metadata"]["name"]


@pytest.mark.covers("F25")
def test_a_third_notebook_with_gpus_is_refused_in_words_and_the_other_two_go_on(portal: Notebooks) -> None:
    pods = [portal.running("ana", server, **GPU1)["metadata"]["uid"] for server in ("", "second")]
    sessions = {session.id for session in portal.live_sessions()}
    message = refusal(portal, "ana", "third", **GPU1)
    assert message.startswith("ana already has 2 GPU sessions, and 2 is the most for one person")
    assert "Stop one of them first." in message
    wait_until(lambda: not portal.starting("ana", "third"), "the start is over")
    assert not (portal.server("ana", "third") or {}).get("ready")
    assert {session.id for session in portal.live_sessions()} == sessions
    assert sorted(pod["metadata"]["uid"] for pod in portal.pods()) == sorted(pods)


@pytest.mark.covers("N07")
def test_a_pod_that_is_deleted_by_hand_ends_its_lease(portal: Notebooks) -> None:
    pod = portal.running("ana", **GPU1)
    portal.api.delete(pod_path(pod))
    wait_until(lambda: not portal.live_sessions(), "the lease has ended")
    wait_until(lambda: portal.server("ana") is None, "the Hub lists the server no more")
    assert portal.pods() == []


@pytest.mark.covers("N07")
def test_an_evicted_pod_ends_its_lease_and_is_deleted(portal: Notebooks) -> None:
    pod = portal.running("ana", **GPU1)
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    portal.api.merge(f"{pod_path(pod)}/status", {"status": {**status, "containerStatuses": None}})
    wait_until(lambda: not portal.live_sessions() and not portal.pods(), "pod and lease are gone")
    assert "Evicted: The node was low on resource: memory." in portal.log
    wait_until(lambda: portal.server("ana") is None, "the Hub lists the server no more")
    page = " ".join(portal.browser("ana").get("/hub/user/ana/lab").text.split())
    assert "Its node evicted its pod (Evicted: The node was low on resource: memory)." in page
    assert "This server had no lasting storage: its files were deleted." in page, "this site's notebooks have no home"
    assert "files are safe" not in page


@pytest.mark.covers("N07")
def test_a_lease_lasts_until_the_containers_have_ended(portal: Notebooks) -> None:
    pod = portal.running("ana", **GPU1)
    keep_terminating(portal, pod)
    (session,) = portal.live_sessions()
    answer = portal.hub("DELETE", "/users/ana/server")
    assert answer.status_code == 202, "the Hub waits for ten seconds, longer than a lease lasts without renewals"
    assert portal.api.get(pod_path(pod))["metadata"]["deletionGracePeriodSeconds"] == 30
    assert [one.id for one in portal.live_sessions()] == [session.id]
    portal.api.delete(pod_path(pod), gracePeriodSeconds="0")  # what the kubelet does when the containers have ended
    wait_until(lambda: not portal.live_sessions(), "the lease has ended")


@pytest.mark.covers("N07")
def test_a_pod_on_a_lost_node_ends_its_lease_once_and_the_next_start_replaces_it(portal: Notebooks) -> None:
    pod = portal.running("ana", **GPU1)
    keep_terminating(portal, pod)
    portal.api.delete(pod_path(pod), gracePeriodSeconds="1")  # as by the taint of a node that is out of reach
    wait_until(lambda: not portal.live_sessions(), "the lease has ended")
    assert portal.api.get(pod_path(pod))["metadata"]["uid"] == pod["metadata"]["uid"], "no kubelet confirms the end"
    wait_until(lambda: portal.server("ana") is None, "the Hub lists the server no more")
    again = portal.running("ana", **GPU1)
    assert again["metadata"]["uid"] != pod["metadata"]["uid"]
    assert len(portal.live_sessions()) == 1


@pytest.mark.covers("N07")
def test_while_the_api_server_is_away_a_stopped_notebook_keeps_its_lease(portal: Notebooks) -> None:
    portal.running("ana", **GPU1)
    (session,) = portal.live_sessions()
    portal.line.cut()
    try:
        portal.hub("DELETE", "/users/ana/server")
        wait_until(lambda: "Kubernetes cannot tell whether the pod of ana runs" in portal.log, "the Hub has tried")
        assert [one.id for one in portal.live_sessions()] == [session.id]
    finally:
        portal.line.mend()
    wait_until(lambda: not portal.live_sessions() and not portal.pods(), "pod and lease are gone")


@pytest.mark.covers("N05")
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.4, 0.8])
def test_stop_while_the_pod_comes_up_leaves_no_lease_and_no_pod(portal: Notebooks, seconds: float) -> None:
    portal.begin("ana", **GPU1)
    time.sleep(seconds)
    portal.stop_server("ana")
    wait_until(lambda: not portal.live_sessions(), "the lease has ended")
    assert portal.pods() == []


@pytest.mark.covers("N07", "N21")
def test_a_killed_hub_finds_its_pods_and_leases_again(portal: Notebooks) -> None:
    pod = portal.running("ana", **GPU1)
    (session,) = portal.live_sessions()
    gone = portal.running("bo", profile="gpu1", team="devops")
    os.kill(portal.hub_pid, signal.SIGKILL)
    portal.stop()
    portal.api.delete(pod_path(gone), gracePeriodSeconds="0")
    portal.start()
    wait_until(lambda: [one.user for one in portal.live_sessions()] == ["ana"], "only the lease of bo has ended")
    assert [one.id for one in portal.live_sessions()] == [session.id]
    assert [one["metadata"]["uid"] for one in portal.pods()] == [pod["metadata"]["uid"]]
    assert portal.server("ana")
    portal.stop_server("ana")
    assert not portal.live_sessions(), "the new Hub knows which lease it has to release"


@pytest.mark.covers("N07")
def test_a_pod_that_a_killed_hub_was_starting_is_adopted_with_its_lease(portal: Notebooks) -> None:
    with full(portal.api, NODES):
        portal.begin("ana", **GPU1)
        wait_until(portal.pods, "there is a pod, which cannot run")
        os.kill(portal.hub_pid, signal.SIGKILL)
        portal.stop()
    (pod,) = portal.pods()
    wait_until(lambda: phase(portal.api, pod["metadata"]["name"]) == "Running", "the pod runs without a Hub")
    portal.start()
    (session,) = portal.live_sessions()
    assert session.id == pod["metadata"]["labels"]["makeway/session"]
    wait_until(lambda: portal.live_sessions()[0].phase == "running", "the service knows that the server runs")
    assert [one["metadata"]["uid"] for one in portal.pods()] == [pod["metadata"]["uid"]]


@pytest.mark.covers("N05")
def test_a_node_that_is_full_of_others_is_told_in_words_and_leaves_nothing(portal: Notebooks) -> None:
    with full(portal.api, NODES):
        message = refusal(portal, "ana", **GPU1)
    assert re.search(r"Kubernetes has not placed the notebook on virtual-\d for (8|9|1\d) s: 0/\d+ nodes are ", message)
    assert "Insufficient nvidia.com/gpu" in message
    assert "choose another profile" in message
    wait_until(lambda: not portal.live_sessions() and not portal.pods(), "neither lease nor pod is left")
    portal.running("ana", **GPU1)  # the refused start has left no settings behind


@pytest.mark.covers("N05")
def test_a_pod_beyond_the_quota_of_the_namespace_is_refused_in_words_and_leaves_nothing(portal: Notebooks) -> None:
    portal.api.create(QUOTAS, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    try:
        wait_until(lambda: "hard" in portal.api.get(f"{QUOTAS}/none").get("status", {}), "the quota counts")
        message = refusal(portal, "ana", **GPU1)
    finally:
        portal.api.delete(f"{QUOTAS}/none")
    assert message.startswith("Kubernetes refuses the notebook's pod: pods ")
    assert "exceeded quota: none, requested: pods=1" in message
    assert "headers" not in message
    wait_until(lambda: not portal.live_sessions() and not portal.pods(), "neither lease nor pod is left")
    portal.running("ana", **GPU1)


@pytest.mark.covers("N05")
def test_a_pod_of_a_priority_class_that_is_missing_is_refused_in_words(portal: Notebooks) -> None:
    path = f"{CLASSES}/{PRIORITY}"
    kept = portal.api.get(path)
    portal.api.delete(path)
    try:
        message = refusal(portal, "ana", **GPU1)
    finally:
        portal.api.create(CLASSES, {"metadata": {"name": PRIORITY}, **{key: kept[key] for key in POLICY}})
    assert message.startswith("Kubernetes refuses the notebook's pod: pods ")
    assert f"no PriorityClass with name {PRIORITY} was found" in message
    assert "An administrator has to create this priority class" in message


@pytest.mark.covers("N05")
def test_a_start_tells_its_phases_with_a_clock_for_each(portal: Notebooks) -> None:
    portal.servers.up = False
    try:
        portal.begin("ana", **GPU1)
        with ThreadPoolExecutor(1) as reader:
            page = reader.submit(progress, portal, "ana")
            wait_until(lambda: [one.phase for one in portal.live_sessions()] == ["running"], "the container runs")
            portal.servers.up = True
            events = page.result()
    finally:
        portal.servers.up = True
    assert events[-1]["ready"]
    told = [event for event in events if "phase" in event]
    assert list(dict.fromkeys(event["phase"] for event in told)) == ["admission", "node", "server"]
    (session,) = portal.live_sessions()
    assert f"Kubernetes has placed the notebook on {session.placement[0].node}" in [one["message"] for one in told]
    assert set(told[-1]["clocks"]) == {"admission", "node", "server"}


def refusal(portal: Notebooks, user: str, server: str = "", **options: Any) -> str:
    """Return why a start is refused, as its user reads it: at once, or at the end of the progress."""
    answer = portal.hub("POST", f"/users/{user}/server{'s/' + server if server else ''}", json=options)
    if answer.is_error:
        return str(answer.json()["message"])
    last = progress(portal, user, server)[-1]
    assert last["failed"], last
    return str(last["message"]).removeprefix("Spawn failed: ")


def progress(portal: Notebooks, user: str, server: str = "") -> list[dict[str, Any]]:
    """Return all events of a start, once it has ended."""
    answer = portal.hub("GET", f"/users/{user}/server{'s/' + server if server else ''}/progress")
    answer.raise_for_status()
    return [json.loads(line.removeprefix("data:")) for line in answer.text.splitlines() if line.startswith("data:")]
