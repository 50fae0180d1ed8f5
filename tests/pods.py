"""Pods of the tests on the Kubernetes cluster, and waiting for what becomes of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kube_cluster.api import GPU, Api, Object
from kube_cluster.node import Node
from kube_cluster.simulated import toleration

PODS = "/api/v1/namespaces/default/pods"
SPARE = (2, 3)
"""GPUs of the real node that most tests do without: they are unhealthy until a test needs all four."""
SECONDS = 240
"""How long a test waits for something that takes a second or two on an idle machine."""


def wait_until(true: Callable[[], Any], what: str, seconds: float = SECONDS, pause: float = 0.05) -> None:
    """Return when it is true; raise TimeoutError after a time that is much too long."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() >= end:
            raise TimeoutError(f"still not true after {seconds} s: {what}")
        time.sleep(pause)


def allocatable(api: Api, node: Node) -> str:
    """Return how many GPUs a node offers."""
    return str(api.get(f"/api/v1/nodes/{node.name}")["status"]["allocatable"][GPU])


def phase(api: Api, name: str, pods: str = PODS) -> str:
    """Return the phase of a pod, or "" when there is none."""
    result = api.items(pods, fieldSelector=f"metadata.name={name}")
    return str(result[0]["status"]["phase"]) if result else ""


def why_pending(api: Api, name: str) -> str:
    """Return what the scheduler says about a pod that waits."""
    conditions = api.get(f"{PODS}/{name}")["status"].get("conditions", [])
    return " ".join(one.get("message", "") for one in conditions)


def simulated_pod(name: str, gpus: int = 1, **annotations: str) -> Object:
    """Return a pod for simulated nodes; `run_for="2s"` is the annotation `makeway.test/run-for`."""
    named = {f"makeway.test/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": named},
        "spec": {
            "containers": [{"name": "main", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}],
            "nodeSelector": {"type": "kwok"},
            "tolerations": [toleration()],
            "restartPolicy": "Never",
        },
    }


def main_process(pod: Object) -> Path:
    """Return the folder in /proc of the first process of a pod with one container, on a node of this machine."""
    (status,) = pod["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            numbers = (process / "status").read_text(encoding="utf-8").partition("NSpid:")[2].splitlines()[0].split()
            if container in (process / "cgroup").read_text(encoding="utf-8") and numbers[-1] == "1":
                return process
    raise AssertionError(f"no process of {pod['metadata']['name']}")


def kill(pod: Object) -> None:
    """Kill the first process of a pod with one container, as the kernel does when memory runs out."""
    os.kill(int(main_process(pod).name), signal.SIGKILL)


def evict(api: Api, pod: Object, grace: int | None = None) -> None:
    """Evict a pod, as before maintenance of its node; `grace` in seconds, else its own."""
    metadata = {name: pod["metadata"][name] for name in ("name", "namespace")}
    body: Object = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    if grace is not None:
        body["deleteOptions"] = {"gracePeriodSeconds": grace}
    api.create("/api/v1/namespaces/{namespace}/pods/{name}/eviction".format(**metadata), body)
