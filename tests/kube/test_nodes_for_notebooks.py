"""A notebook whose pod needs a node that the cluster's autoscaler adds: the real Hub, KubeSpawner and scheduler.

The test says what the autoscaler says, by its events, and adds the node.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kube.notebooks import Notebooks, add_nodes, notebooks
from pods import wait_until

from kube_cluster.api import Object
from kube_cluster.cluster import Cluster
from kube_cluster.simulated import toleration
from kube_cluster.stand_in_autoscaler import create_event

pytestmark = [pytest.mark.kube, pytest.mark.slow]

CPU = {"profile": "cpu"}
LATE = {"makeway.test/late": "yes"}
START, NODE = 6, 9
"""`start_timeout` and `node_seconds`"""
MORE = f"""
c.KubeSpawner.start_timeout = {START}
c.MakewayKubeSpawner.node_seconds = {NODE}
c.KubeSpawner.node_selector = {LATE}
c.KubeSpawner.tolerations = [{toleration()}, {{'key': 'nvidia.com/gpu', 'operator': 'Exists'}}]
"""


@pytest.fixture(scope="module")
def portal(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebooks]:
    """A portal whose notebooks without GPUs fit on no node."""
    control_plane.simulate()
    with notebooks(tmp_path_factory.mktemp("portal"), control_plane, MORE) as portal:
        yield portal


@pytest.fixture(autouse=True)
def nothing_left(portal: Notebooks) -> Iterator[None]:
    yield
    portal.clear()


def pending_pod(portal: Notebooks) -> Object:
    """Start ana's notebook; return its pod once the scheduler has found no place for it."""
    portal.begin("ana", **CPU)

    def unschedulable() -> bool:
        conditions = [one for pod in portal.pods() for one in pod["status"].get("conditions", ())]
        return any(one.get("reason") == "Unschedulable" for one in conditions)

    wait_until(unschedulable, "the pod fits nowhere")
    (pod,) = portal.pods()
    return pod


def follow(portal: Notebooks) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """Read what the pending page shows, until the start has ended."""
    events: list[dict[str, Any]] = []

    def read() -> None:
        answer = portal.hub("GET", "/users/ana/server/progress")
        lines = answer.text.splitlines()
        events.extend(json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:"))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, events


@pytest.mark.covers("F83")
def test_a_start_lasts_longer_than_its_time_out_while_a_node_is_coming(
    portal: Notebooks, control_plane: Cluster
) -> None:
    pod = pending_pod(portal)
    began = time.monotonic()
    create_event(
        portal.api, pod, "TriggeredScaleUp", "pod triggered scale-up: [{late 0->1 (max: 1)}]", "cluster-autoscaler"
    )
    thread, events = follow(portal)
    while time.monotonic() - began < START + 2:
        assert portal.starting("ana"), "its time-out does not count while a node is coming"
        time.sleep(0.5)
    add_nodes(control_plane, ["late-1"], **LATE)
    try:
        wait_until(lambda: not portal.starting("ana"), "the start is over")
        assert (portal.server("ana") or {}).get("ready"), portal.log[-5000:]
        (running,) = portal.pods()
        assert running["metadata"]["uid"] == pod["metadata"]["uid"]
        assert running["spec"]["nodeName"] == "late-1"
        thread.join(30)
        messages = [str(one["message"]) for one in events]
        words = "The cluster is adding a node. That takes some minutes. The start waits for it for up to 9 s."
        assert words in messages
        assert messages.index(words) < messages.index("Kubernetes has placed the notebook on late-1")
    finally:
        portal.clear()
        portal.api.delete("/api/v1/nodes/late-1")


@pytest.mark.covers("F83")
def test_a_node_that_does_not_come_ends_the_start_in_words(portal: Notebooks) -> None:
    pod = pending_pod(portal)
    began = time.monotonic()
    create_event(portal.api, pod, "Nominated", "Pod should schedule on: nodeclaim/late-x1", "karpenter")
    thread, events = follow(portal)
    wait_until(lambda: not portal.starting("ana"), "the start is over")
    assert NODE <= time.monotonic() - began <= START + NODE + 5
    thread.join(30)
    message = str(events[-1]["message"])
    assert events[-1]["failed"]
    assert "Kubernetes has reported for" in message
    assert "The cluster has a node for it: Pod should schedule on: nodeclaim/late-x1. Start it again: " in message
    assert "raise the node_seconds of the Hub's MakewayKubeSpawner" in message


@pytest.mark.covers("F83")
def test_no_longer_than_its_time_out_lasts_a_start_for_which_no_node_comes(portal: Notebooks) -> None:
    pod = pending_pod(portal)
    began = time.monotonic()
    create_event(
        portal.api,
        pod,
        "NotTriggerScaleUp",
        "pod didn't trigger scale-up: 1 max node group size reached",
        "cluster-autoscaler",
    )
    wait_until(lambda: not portal.starting("ana"), "the start is over")
    assert time.monotonic() - began < START + 3
