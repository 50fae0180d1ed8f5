"""A real node runs real containers with virtual GPUs, and lives through the restart of its services."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import yaml
from pods import PODS, SPARE, allocatable, phase, wait_until, why_pending

from kube_cluster.api import Api
from kube_cluster.images import host_pod
from kube_cluster.node import Node

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("real_node")]

FOREVER = ["sleep", "infinity"]
LOG = f"{PODS}/{{}}/log"


def test_a_pod_with_a_virtual_gpu_runs_and_logs(api: Api) -> None:
    script = "echo devices $CUDA_VISIBLE_DEVICES virtual $MAKEWAY_VIRTUAL_GPUS; exit 7"
    api.create(PODS, host_pod("one", ["sh", "-c", script], gpus=1))
    wait_until(lambda: phase(api, "one") == "Failed", "the pod has ended")
    assert api.text(LOG.format("one")) == "devices 0 virtual 1\n"
    (status,) = api.get(f"{PODS}/one")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["exitCode"] == 7


def test_the_pod_in_the_documentation_runs(api: Api) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/try-on-kubernetes.md").read_text(encoding="utf-8")
    (text,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "kind: Pod" in text]
    pod = yaml.safe_load(text)
    api.create(PODS, pod)
    wait_until(lambda: phase(api, pod["metadata"]["name"]) == "Succeeded", "the pod has run")
    assert api.text(LOG.format(pod["metadata"]["name"])) == "devices: 0\n"


def test_a_pod_beyond_the_capacity_waits_for_its_turn(api: Api) -> None:
    api.create(PODS, host_pod("both", FOREVER, gpus=2))
    wait_until(lambda: phase(api, "both") == "Running", "the first pod runs")
    api.create(PODS, host_pod("next", ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], gpus=2))
    wait_until(lambda: "Insufficient nvidia.com/gpu" in why_pending(api, "next"), "the second pod says why it waits")
    assert phase(api, "next") == "Pending"
    api.delete(f"{PODS}/both", gracePeriodSeconds="1")
    wait_until(lambda: phase(api, "next") == "Succeeded", "the second pod has run")
    assert api.text(LOG.format("next")) == "0,1\n"


def test_a_pod_reaches_the_api_server_by_its_service(api: Api) -> None:
    code = "import socket; print(socket.create_connection(('10.96.0.1', 443), 20).getpeername())"
    api.create(PODS, host_pod("caller", ["python3", "-c", code]))
    wait_until(lambda: phase(api, "caller") in ("Succeeded", "Failed"), "the pod has ended")
    assert api.text(LOG.format("caller")) == "('10.96.0.1', 443)\n"


def test_the_gpus_outlive_a_restart_of_the_kubelet(api: Api, real_node: Node) -> None:
    api.create(PODS, host_pod("before", FOREVER, gpus=1))
    wait_until(lambda: phase(api, "before") == "Running", "the first pod runs")
    registered = real_node.log("device-plugin").count("registered")
    old = real_node.service("kubelet")
    assert old
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: real_node.service("kubelet") not in (None, old), "the kubelet runs again")
    wait_until(lambda: real_node.log("device-plugin").count("registered") > registered, "the plugin registered again")
    wait_until(lambda: allocatable(api, real_node) == "2", "the node offers both GPUs again")
    api.create(PODS, host_pod("after", ["true"], gpus=1))
    wait_until(lambda: phase(api, "after") == "Succeeded", "a pod gets the other GPU")
    assert phase(api, "before") == "Running"
    api.create(PODS, host_pod("third", ["true"], gpus=2))
    wait_until(lambda: "Insufficient nvidia.com/gpu" in why_pending(api, "third"), "the first pod's GPU is still taken")


def test_a_broken_gpu_is_offered_no_more(api: Api, real_node: Node) -> None:
    real_node.break_gpus(1, *SPARE)
    wait_until(lambda: allocatable(api, real_node) == "1", "the node offers one GPU")
    api.create(PODS, host_pod("sound", ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], gpus=1))
    wait_until(lambda: phase(api, "sound") == "Succeeded", "the pod has run")
    assert api.text(LOG.format("sound")) == "0\n"
    real_node.break_gpus(*SPARE)
    wait_until(lambda: allocatable(api, real_node) == "2", "the node offers both GPUs again")
