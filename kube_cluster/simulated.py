"""Simulated nodes with GPUs by kwok: no process runs, but nodes and pods go through the same states.

A pod on such a node is running a moment after it is bound. Annotations decide what happens then:

- `makeway.test/run-for`: it ends by itself after this duration (as in `90s`); without `exit-code` with success.
- `makeway.test/exit-code`: the exit code of its containers; without `run-for` after one second.
- `makeway.test/terminating-for`: how long it terminates once it is deleted; 200 ms without it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import processes, programs
from .api import GPU, Api, Object
from .certificates import MASTERS
from .control_plane import ControlPlane
from .folder import Folder

STAGES = Path(__file__).with_name("stages.yaml")
READY_SECONDS = 300.0
SECONDS_A_NODE = 0.5
"""What each node adds to it, on a machine that has other work, too"""
SIMULATED = "kwok.x-k8s.io/node"
"""The annotation of the nodes that kwok manages, and the key of their taint."""
LABEL = "type=kwok"
EXIT_CODE = "makeway.test/exit-code"
"""The annotation of pods that ends them with this exit code."""


def start(folder: Folder, plane: ControlPlane) -> None:
    """Start kwok, one process for all simulated nodes of a cluster."""
    kubeconfig = plane.authority.kubeconfig(plane.server, "kwok", MASTERS)
    options = {
        "kubeconfig": kubeconfig,
        "config": STAGES,
        "manage-all-nodes": "false",
        "manage-nodes-with-annotation-selector": f"{SIMULATED}=fake",
        "node-lease-duration-seconds": 40,
        "cidr": "10.0.0.1/24",
        "node-ip": "10.0.0.1",
    }
    program = programs.built() / "kwok"
    processes.start(folder, "kwok", [program, *(f"--{name}={value}" for name, value in options.items())])


def node(name: str, gpus: int, model: str) -> Object:
    """Return a node with these GPUs and the usual CPUs and memory."""
    room = {"cpu": "96", "memory": "1Ti", "pods": "110", GPU: str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {SIMULATED: "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {
                "type": "kwok",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                f"{GPU}.product": model,
                f"{GPU}.count": str(gpus),
            },
        },
        "spec": {"taints": [{"key": SIMULATED, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }


def add(folder: Folder, api: Api, names: list[str], gpus: int, model: str) -> None:
    """Create nodes and return when all of them are ready."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: api.create("/api/v1/nodes", node(name, gpus, model)), names))
    wanted = set(names)

    def ready() -> bool:
        if not is_ready(api.get(f"/api/v1/nodes/{names[-1]}")):  # a list of a thousand nodes has megabytes
            return False
        nodes = api.items("/api/v1/nodes", labelSelector=LABEL)
        return wanted <= {one["metadata"]["name"] for one in nodes if is_ready(one)}

    seconds = READY_SECONDS + SECONDS_A_NODE * len(names)
    processes.wait_until(ready, f"One of {len(names)} simulated nodes", seconds, lambda: processes.check(folder))


def is_ready(item: Object) -> bool:
    """Whether a node or a pod says that it is ready."""
    conditions = item.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def toleration() -> Object:
    """Return the toleration that a pod needs on simulated nodes."""
    return {"key": SIMULATED, "operator": "Exists", "effect": "NoSchedule"}
