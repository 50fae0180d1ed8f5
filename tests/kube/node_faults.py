"""Faults of a real node that pass: each is caused for real, and returns once the node is as before."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from job_service import JOBS, PODS, Serving
from makeway_api.models import Job
from pods import evict, wait_until

from kube_cluster import processes
from kube_cluster.api import GPU, ApiProblem
from kube_cluster.node import Node
from kube_cluster.simulated import is_ready

Fault = Callable[[Serving, Node], Awaitable[None]]
FILL = "import time\nopen('/tmp/large', 'wb').write(bytes(200 * 2**20))\ntime.sleep(600)"
"""Writes more to the disk than the profile `scratch` has."""


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait in a thread: the service of the test may run in this process."""
    await asyncio.to_thread(wait_until, true, what)


async def blip(serving: Serving, node: Node) -> None:
    """Have Kubernetes call the node not ready, until its kubelet says again that it is."""
    condition = {"type": "Ready", "status": "False", "reason": "Blip", "message": "a test says so"}
    path = f"/api/v1/nodes/{node.name}"
    conditions = [one for one in serving.cluster.api.get(path)["status"]["conditions"] if one["type"] != "Ready"]
    serving.cluster.api.merge(f"{path}/status", {"status": {"conditions": [*conditions, condition]}})
    await until(lambda: is_ready(serving.cluster.api.get(path)), f"{node.name} is ready again")


async def restart_kubelet(serving: Serving, node: Node) -> None:
    """Kill the kubelet, which is started again and has to register the GPUs anew."""
    old, many = node.service("kubelet"), allocatable(serving, node)
    assert old is not None
    os.kill(old, signal.SIGKILL)
    await until(lambda: node.service("kubelet") not in (None, old), "the kubelet runs again")
    await offers_all(serving, node, many)


async def restart_device_plugin(
    serving: Serving, node: Node, again_until: Callable[[], Awaitable[bool]] | None = None
) -> None:
    """Kill the device plugin: until it has registered again the node offers no GPU, whatever its pods hold.

    With `again_until` it is killed again whenever it is back, until that is true, for five seconds at most.
    """
    registered, many = node.log("device-plugin").count("registered"), allocatable(serving, node)
    assert kill_device_plugin(node)
    end = time.monotonic() + 5.0
    while again_until is not None and time.monotonic() < end and not await again_until():
        kill_device_plugin(node)
        registered = node.log("device-plugin").count("registered")
        await asyncio.sleep(0.05)
    await until(lambda: node.log("device-plugin").count("registered") > registered, "the plugin registered again")
    await offers_all(serving, node, many)


def kill_device_plugin(node: Node) -> bool:
    """Kill the device plugin; return whether it ran."""
    plugins = [pid for pid in processes.marked(node.folder) if "makeway_device_plugin" in words(pid)]
    for pid in plugins:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(plugins)


async def drain(serving: Serving, node: Node) -> None:
    """Cordon the node, evict all of its pods of jobs, and give it back."""
    path = f"/api/v1/nodes/{node.name}"
    serving.cluster.api.merge(path, {"spec": {"unschedulable": True}})
    try:
        for pod in serving.cluster.api.items(PODS, labelSelector=JOBS):
            with suppress(ApiProblem):  # it has ended meanwhile
                evict(serving.cluster.api, pod)
        await asyncio.sleep(2.0)
    finally:
        serving.cluster.api.merge(path, {"spec": {"unschedulable": False}})


async def fill_disk(serving: Serving, node: Node) -> None:
    """Submit a job that writes more to the disk than it may: it fails, and no other does."""
    job: Job = await serving.submit("bo", "fills", "python3", "-c", FILL, profile="scratch")
    done = await serving.reaches(job, "failed", "succeeded", "cancelled")
    assert done.message.startswith("it wrote more to the disk of its node than its pod may"), done


FAULTS: Mapping[str, Fault] = {
    "blip": blip,
    "kubelet": restart_kubelet,
    "plugin": restart_device_plugin,
    "drain": drain,
    "disk": fill_disk,
}


def allocatable(serving: Serving, node: Node) -> str:
    """Return how many GPUs the node offers."""
    return str(serving.cluster.api.get(f"/api/v1/nodes/{node.name}")["status"]["allocatable"].get(GPU, "0"))


async def offers_all(serving: Serving, node: Node, many: str = "2") -> None:
    """Wait until the node offers its GPUs again."""
    await until(lambda: allocatable(serving, node) == many, f"{node.name} offers its GPUs again")


def words(pid: int) -> list[str]:
    """Return the command line of a process, [] where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return []
